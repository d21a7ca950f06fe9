"""Models that are not diffusers': small ones, faithful in how their blocks are built and called.

original_wan: the block of Wan's own repository: keyword arguments, modulation in fp32 under autocast(enabled=False),
complex rotary embedding in float64, one attention function for self- and cross-attention. fastvideo: an attention
layer that is a module of its own and keeps to (batch, sequence, heads, dim), positional arguments, a tuple of
frequencies, a pre-attention half that returns a tuple. plain: torch.nn.TransformerEncoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

WIDTH, HEADS, GRID, TEXT = 24, 2, (2, 3, 4), 5
TOKENS = GRID[0] * GRID[1] * GRID[2]


class Substitute(NamedTuple):
    """blocks: what `enable(model, blocks=...)` gets. calls: attention calls of one step; long: those over the video."""

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    blocks: str
    calls: int
    long: int


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
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.time = torch.nn.Linear(8, 6 * WIDTH)
        self.blocks = torch.nn.ModuleList(WanBlock() for _ in range(layers))
        angles = torch.outer(torch.arange(TOKENS), 0.1 ** torch.arange(WIDTH // HEADS // 2))
        self.freqs = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[None, :, None]

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        e = self.time(t).unflatten(-1, (6, WIDTH))
        kwargs = {"e": e, "freqs": self.freqs, "context": context, "context_lens": None}
        for block in self.blocks:
            x = block(x, **kwargs)
        return x


# FastVideo


class DistributedAttention(torch.nn.Module):
    """Would exchange heads for sequence between ranks; with one rank it calls the backend's implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, freqs_cis: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, None]:
        if freqs_cis is not None:
            cos, sin = (t.to(q.dtype) for t in freqs_cis)
            q, k = (t * cos + torch.cat((-t[..., 1::2], t[..., ::2]), -1) * sin for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2), None


class FastVideoBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v, self.to_out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attn1, self.attn2 = DistributedAttention(), DistributedAttention()
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.SiLU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        freqs_cis: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(hidden_states) * (1 + temb)
        q, k, v = (layer(normed).unflatten(-1, (HEADS, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        hidden_states = hidden_states + self.to_out(self.attn1(q, k, v, freqs_cis)[0].flatten(2))
        q = self.to_q(self.norm(hidden_states)).unflatten(-1, (HEADS, -1))
        k, v = (layer(encoder_hidden_states).unflatten(-1, (HEADS, -1)) for layer in (self.to_k, self.to_v))
        hidden_states = hidden_states + self.to_out(self.attn2(q, k, v, None)[0].flatten(2))
        return hidden_states + self.ffn(self.norm(hidden_states)), encoder_hidden_states


class FastVideoModel(torch.nn.Module):
    """Its blocks stand two levels down."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.transformer = torch.nn.Module()
        self.transformer.layers = torch.nn.ModuleList(FastVideoBlock() for _ in range(layers))
        angles = torch.randn(1, TOKENS, 1, WIDTH // HEADS)
        self.freqs_cis = (angles.cos(), angles.sin())

    def forward(self, video: torch.Tensor, text: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for layer in self.transformer.layers:
            video, text = layer(video, text, temb, self.freqs_cis)
        return video


# torch alone


class Plain(torch.nn.Module):
    """torch.nn.MultiheadAttention takes its fast path only without gradients; in training it calls SDPA."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        layer = torch.nn.TransformerDecoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.decoder = torch.nn.TransformerDecoder(layer, layers)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.decoder(video, text)


def _video() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH).requires_grad_()


def _text() -> torch.Tensor:
    return torch.randn(1, TEXT, WIDTH).requires_grad_()


SUBSTITUTES = {
    "original_wan": Substitute(
        OriginalWan, lambda: {"x": _video(), "t": torch.randn(1, 8), "context": _text()}, "blocks", 4, 2
    ),
    "fastvideo": Substitute(
        FastVideoModel,
        lambda: {"video": _video(), "text": _text(), "temb": torch.randn(1, 1, WIDTH)},
        "transformer.layers",
        4,
        2,
    ),
    "plain": Substitute(Plain, lambda: {"video": _video(), "text": _text()}, "decoder.layers", 4, 2),
}


def substitute(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A substitute in training mode and its keyword arguments, the same at every call."""
    torch.manual_seed(0)
    model, inputs = SUBSTITUTES[name].make().train(), SUBSTITUTES[name].inputs()
    cast = {key: t.detach().to(dtype).requires_grad_(t.requires_grad) for key, t in inputs.items()}
    return model.to(dtype), cast
