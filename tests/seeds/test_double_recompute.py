"""The case of "Fix double recomputation in torch.compile round-trip": a sharded language model, compiled twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastac import graph
from tests.graph.partitioned import ShardedLinear, Split, min_cut, round_trip
from tests.graph.partitioned import eight_ranks as eight_ranks


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def linear(width_in: int, width_out: int) -> ShardedLinear:
    return ShardedLinear(torch.nn.Linear(width_in, width_out, bias=False))


class LlamaBlock(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, 4 * width), linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    """Blocks like those of a language model: RMS norm, rotary embedding, causal attention, gated feed-forward."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(LlamaBlock(width, 4) for _ in range(layers))
        self.out = linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> Any:
        angles = torch.arange(x.shape[1])[:, None] * torch.arange(8)[None] / 8
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.out(norm(x))


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eight_ranks")]


def compiled_twice(guarded: bool, budget: float, cse: bool) -> tuple[Split, Split]:
    """Both partitions. guarded: the second replays the first. budget: memory budget of the first min-cut."""
    model, args = Llama(), (torch.randn(2, 32, 64, dtype=torch.bfloat16),)
    second = graph.replaying_partitioner if guarded else min_cut
    return round_trip(model, args, graph.partitioner("attn_only"), second, budget=budget, cse=cse)[:2]


FIRST = {0.3: ((4, 0), (29, 28), 241_664), 1.0: ((4, 0), (29, 26), 702_464)}


@pytest.mark.parametrize("budget", FIRST)
def test_gathers_attention_and_saved_bytes_are_those_of_the_first_compile(budget: float) -> None:
    first, second = compiled_twice(True, budget, cse=budget < 1)
    assert second.figures == first.figures == FIRST[budget]


@pytest.mark.parametrize(
    ("budget", "cse", "gathers"), [(0.3, True, (29, 26)), (1.0, True, (29, 26)), (1.0, False, (55, 26))]
)
def test_min_cut_undoes_what_the_first_compile_chose(budget: float, cse: bool, gathers: tuple[int, int]) -> None:
    first, second = compiled_twice(False, budget, cse)
    assert first.figures == FIRST[budget]
    assert second.figures == ((4, 0), gathers, 702_464)
