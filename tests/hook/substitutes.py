"""Models that are not diffusers': small ones, faithful in how their blocks are built and called.

OriginalWan: the block of Wan's own repository: keyword arguments, modulation in fp32 under autocast(enabled=False),
complex rotary embedding in float64, one attention function for self- and cross-attention. Plain: torch's own decoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

WIDTH, HEADS, GRID, TEXT = 24, 2, (2, 3, 4), 5
TOKENS = GRID[0] * GRID[1] * GRID[2]


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(1, count, WIDTH).requires_grad_()


# The repository of Wan


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, heads, dim) in half precision for the kernel, back in the query's dtype."""
    half = [t.to(torch.bfloat16).transpose(1, 2) for t in (query, key, value)]
    return F.scaled_dot_product_attention(*half).transpose(1, 2).contiguous().to(query.dtype)


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.to(torch.float64).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * frequencies).flatten(-2).to(x.dtype)


class WanAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, context: torch.Tensor, freqs: torch.Tensor | None = None) -> torch.Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (HEADS, -1))
        k = self.norm_k(self.k(context)).unflatten(-1, (HEADS, -1))
        v = self.v(context).unflatten(-1, (HEADS, -1))
        if freqs is not None:
            q, k = rotated(q, freqs), rotated(k, freqs)
        return self.o(attention(q, k, v).flatten(2))


class WanBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.norm3 = torch.nn.LayerNorm(WIDTH)
        self.self_attn, self.cross_attn = WanAttention(), WanAttention()
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        self.modulation = torch.nn.Parameter(torch.randn(1, 6, WIDTH) / WIDTH**0.5)

    def forward(
        self, x: torch.Tensor, e: torch.Tensor, freqs: torch.Tensor, context: torch.Tensor, context_lens: None
    ) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            parts = (self.modulation + e).chunk(6, dim=1)
        y = self.self_attn(self.norm1(x) * (1 + parts[1]) + parts[0], self.norm1(x) * (1 + parts[1]) + parts[0], freqs)
        x = x + y * parts[2]
        x = x + self.cross_attn(self.norm3(x), context)
        y = self.ffn(self.norm2(x) * (1 + parts[4]) + parts[3])
        return x + y * parts[5]


class OriginalWan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = torch.nn.Linear(8, 6 * WIDTH)
        self.blocks = torch.nn.ModuleList(WanBlock() for _ in range(2))
        angles = torch.outer(torch.arange(TOKENS), 0.1 ** torch.arange(WIDTH // HEADS // 2))
        self.freqs = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[None, :, None]

    @staticmethod
    def inputs() -> dict[str, Any]:
        return {"x": _tokens(TOKENS), "t": torch.randn(1, 8), "context": _tokens(TEXT)}

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        e = self.time(t).unflatten(-1, (6, WIDTH))
        kwargs = {"e": e, "freqs": self.freqs, "context": context, "context_lens": None}
        for block in self.blocks:
            x = block(x, **kwargs)
        return x


# torch alone


class Plain(torch.nn.Module):
    """torch.nn.MultiheadAttention takes its fast path only without gradients; in training it calls SDPA."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerDecoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.decoder = torch.nn.TransformerDecoder(layer, 2)

    @staticmethod
    def inputs() -> dict[str, Any]:
        return {"video": _tokens(TOKENS), "text": _tokens(TEXT)}

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.decoder(video, text)
