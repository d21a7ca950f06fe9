"""Autocast reaches kernels in Python also where a region is watched, or runs under torch's selective checkpointing.

Below a dispatch mode torch leaves autocast out: the same kernel computes in another dtype there.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.support import assert_same, train_step

ENGINES = pytest.mark.parametrize("engine", ["tape", "sac"])


@functools.cache
def mixing() -> Any:
    """An op with a kernel in Python: a product of matrices, which autocast computes in bfloat16. Tells its state."""

    @torch.library.custom_op(f"fastac_tests::mixing_{uuid.uuid4().hex[:8]}", mutates_args=())
    def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states.append(torch.is_autocast_enabled("cpu"))
        return x @ weight

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.float()
        return (grad @ weight.float().T).to(x.dtype), (x.float().flatten(0, -2).T @ grad.flatten(0, -2)).to(
            weight.dtype
        )

    mix.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return mix


states: list[bool] = []


class Attention(torch.autograd.Function):
    """Its forward computes in bfloat16 where autocast is on, by torch's own decorators."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        states.append(q.dtype is torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            output, statistics = support.attention_math(q.float(), k.float(), v.float())
        ctx.save_for_backward(q, k, v, output, statistics)
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return support.attention_math_backward(grad.float(), *(saved.float() for saved in ctx.saved_tensors))


def step(function: Any, enabled: bool = True) -> Any:
    states.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return train_step(function, support.attention_inputs(7, 12))


@ENGINES
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_an_op_that_is_no_attention(enabled: bool, engine: str) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = mixing()(F.scaled_dot_product_attention(torch.tanh(query), key, value), weight.sin())
        with torch.autocast("cpu", enabled=False):
            output = mixing()(output.float(), weight)
        return torch.tanh(output)

    reference = step(region, enabled)
    for _ in range(2):  # the first region is watched
        assert_same(step(functools.partial(fastac.checkpoint, region, engine=engine), enabled), reference)
        assert states == [enabled, False, enabled, False], "in the forward and in the recompute"


@ENGINES
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_an_attention_that_was_made_visible(enabled: bool, engine: str) -> None:
    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Attention.apply(torch.tanh(query), key, value).float())

    reference = step(region, enabled)
    fastac.make_visible(Attention, key="k", layout="bhsd", dropout=None)
    for _ in range(2):
        assert_same(step(functools.partial(fastac.checkpoint, region, engine=engine), enabled), reference)
        assert states == [enabled], "it ran once"
