"""What a region's autograd graph tells: Functions that hide an attention, told from what only stands beside one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.support import train_step


def hidden(name: str = "TritonAttention") -> Any:
    """The apply of a Function of that name, over a kernel of no op."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            output, statistics = support.attention_math(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            return output

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    return type(name, (Hidden,), {}).apply


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def without_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A teacher's attention, which autograd knows nothing of."""
    with torch.no_grad():
        return sdpa(query, key, value)


class TwiceInside(torch.autograd.Function):
    """One node over two calls that are recorded, as ring attention is."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        return sdpa(q, k, v) + sdpa(q, v, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class AttentionWithGraphInside(torch.autograd.Function):
    """A wrapper whose inside autograd differentiates: the node of the call is not in the region's graph."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        with torch.enable_grad():
            inner = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            output = sdpa(*inner) * 1.0
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class Block(torch.nn.Module):
    """Attention functions, one after another."""

    def __init__(self, *attends: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attends = attends
        self.out = torch.nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for attend in self.attends:
            query = query + torch.tanh(attend(torch.tanh(query), torch.tanh(key), value))
        return self.out(query)


def inputs(keys: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 2, 12, 8), "key": (1, 2, keys, 8), "value": (1, 2, keys, 8)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


BESIDE: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "an aten op": lambda: sdpa,
    "a custom op": lambda: support.custom_attention("beside_a_hidden_attention"),
    "attention without gradient": lambda: without_gradient,
    "one Function, two calls": lambda: TwiceInside.apply,
    "a wrapper": lambda: AttentionWithGraphInside.apply,
}


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_hidden_attention_is_told_from_what_is_recorded_before_it(beside: str, engine: str) -> None:
    block = Block(BESIDE[beside](), hidden())
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"TritonAttention, an autograd\.Function, looks like"):
        train_step(functools.partial(fastac.checkpoint, block, engine=engine), inputs())


@pytest.mark.parametrize("beside", [name for name in BESIDE if name != "attention without gradient"])
def test_and_behind_it(beside: str) -> None:
    """Attention without gradient can not be told there: the newest node is that of the hidden one's addition."""
    block = Block(hidden(), BESIDE[beside]())
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"TritonAttention, an autograd\.Function, looks like"):
        train_step(functools.partial(fastac.checkpoint, block), inputs())


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_recorded_its_calls_is_left_alone(beside: str, engine: str) -> None:
    shown = BESIDE[beside]()
    block = Block(shown, sdpa, shown)
    reference = train_step(functools.partial(block), inputs())
    support.assert_same(train_step(functools.partial(fastac.checkpoint, block, engine=engine), inputs()), reference)


@pytest.mark.parametrize(
    "name",
    [
        "FlashFunc",
        "RingFlashFunc",
        "MaskedAttention",
        "AttentionFwdBwd",
        "_attention",
        "_fMHA",
        "NeighborhoodAttn2D",
        "GatedAttention",
        "AttentionWithGate",
        "QKNormAttention",
        "RopeAttention",
        "SplitKVAttention",
        "MaskAttention",
        "FlashAttnVarlenFunc",
        "FlashAttnQKVPackedFunc",
        "SelfAttentionFn",
    ],
)
def test_names_of_attention(name: str) -> None:
    with pytest.raises(fastac.PolicyNotAppliedError, match=rf"{name}, an autograd\.Function, looks like an attention"):
        train_step(functools.partial(fastac.checkpoint, Block(hidden(name))), inputs())


@pytest.mark.parametrize(
    "name",
    [
        "UlyssesAttentionAllToAll",
        "AttnBiasFunction",
        "_AttnInputScatter",
        "AttentionGate",
        "AttnRopeFunction",
        "FusedAttnQKNorm",
        "AttentionMask",
        "FusedMLP",
        "Flatten",
    ],
)
def test_names_of_what_stands_beside_attention(name: str) -> None:
    train_step(functools.partial(fastac.checkpoint, Block(sdpa, hidden(name))), inputs())


class AttentionPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.number = len(tensors)
        return tensors[0] * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * 2, *[None] * (ctx.number - 1))


@pytest.mark.parametrize("case", ["two inputs", "flat inputs"])
def test_what_has_not_the_inputs_of_an_attention_is_left_alone(case: str) -> None:
    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if case == "two inputs":
            return AttentionPool.apply(query, key)
        return AttentionPool.apply(query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2))

    train_step(functools.partial(fastac.checkpoint, region), inputs())


@pytest.mark.parametrize("keys", [1023, 1024])
def test_only_what_the_policy_saves_counts(keys: int) -> None:
    region = functools.partial(fastac.checkpoint, Block(hidden()), policy="long_attn_only")
    if keys < 1024:
        train_step(region, inputs(keys))
    else:
        with pytest.raises(fastac.PolicyNotAppliedError, match="TritonAttention"):
            train_step(region, inputs(keys))


@pytest.mark.parametrize("first", [(sdpa,), (sdpa, sdpa), (sdpa, sdpa, sdpa)], ids=["as many", "more", "many more"])
def test_a_later_block_of_a_class_is_looked_at_as_well(first: tuple[Any, ...]) -> None:
    train_step(functools.partial(fastac.checkpoint, Block(*first)), inputs())
    with pytest.raises(fastac.PolicyNotAppliedError, match="TritonAttention"):
        train_step(functools.partial(fastac.checkpoint, Block(sdpa, hidden())), inputs())


def test_a_later_block_that_is_like_the_first_is_no_matter() -> None:
    for block in [Block(sdpa, sdpa) for _ in range(3)]:
        for _ in range(2):
            train_step(functools.partial(fastac.checkpoint, block), inputs())


def test_outputs_in_a_dataclass_are_looked_into() -> None:
    @dataclasses.dataclass
    class Output:
        sample: torch.Tensor

    class Returns(Block):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
            return Output(super().forward(*args, **kwargs))

    with pytest.raises(fastac.PolicyNotAppliedError, match="TritonAttention"):
        fastac.checkpoint(Returns(sdpa, hidden()), *inputs().values())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["TritonAttention", "VideoKernel"])
def test_a_hidden_function_in_a_compiled_block(name: str, compiled: bool) -> None:
    """One that dynamo traces through: found by its name, or by its matrix products with a softmax between."""

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            probabilities = (q @ k.transpose(-1, -2)).softmax(-1)
            ctx.save_for_backward(probabilities)
            return probabilities @ v

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (probabilities,) = ctx.saved_tensors
            return grad, grad, probabilities.transpose(-1, -2) @ grad

    block = Block(sdpa, hidden(name) if name == "TritonAttention" else type(name, (Written,), {}).apply)
    if compiled:
        block.compile(backend="aot_eager")
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"ran as small ops|looks like an attention"):
        train_step(functools.partial(fastac.checkpoint, block), inputs())
