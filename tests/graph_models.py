"""A stack as large language models have it, and training steps of models whose memory is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


class LlamaBlock(torch.nn.Module):
    """RMSNorm, causal attention with rotary embedding and grouped keys, gated feed-forward; no biases."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, width // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (heads + 2 * key_heads) * self.dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(3 * width, width, bias=False)

    def _rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """hidden: (batch, tokens, width); angles: (tokens, dim / 2) -> like hidden."""
        parts = self.qkv(self.norms[0](hidden)).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.key_heads, self.key_heads], dim=1)
        query, key = self._rotated(query, angles), self._rotated(key, angles)
        key, value = (t.repeat_interleave(self.heads // self.key_heads, dim=1) for t in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(torch.nn.Module):
    """Token embedding, blocks, a head that shares its weight with the embedding."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4, key_heads: int = 2, words: int = 100) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(LlamaBlock(width, heads, key_heads) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.dim = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, tokens) -> logits (batch, tokens, words)."""
        hidden = self.embedding(tokens)
        frequencies = 1e4 ** -torch.linspace(0, 1, self.dim // 2)
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float32), frequencies)
        for layer in self.layers:
            hidden = layer(hidden, angles.to(hidden.dtype))
        return self.head(self.norm(hidden))


def step_of(model: torch.nn.Module) -> Callable[..., Any]:
    """A training step: the loss, and the gradients of all parameters."""

    def step(**inputs: Any) -> Any:
        output = model(**inputs)
        output = output[0] if isinstance(output, tuple) else output
        loss = output.float().square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step
