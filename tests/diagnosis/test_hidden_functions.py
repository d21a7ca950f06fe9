"""What a region's autograd graph shows: Functions that hide an attention, and others beside one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import PolicyNotAppliedError
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
    """A teacher's attention."""
    with torch.no_grad():
        return sdpa(query, key, value)


class TwiceInside(torch.autograd.Function):
    """One node over two recorded calls, as in ring attention."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        return sdpa(q, k, v) + sdpa(q, v, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class AttentionWithGraphInside(torch.autograd.Function):
    """Autograd differentiates its inside: the node of the call is not in the region's graph."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        with torch.enable_grad():
            output = sdpa(*[tensor.detach().requires_grad_() for tensor in (q, k, v)]) * 1.0
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class Block(torch.nn.Module):
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


def train(*attends: Callable[..., torch.Tensor], policy: str = "attn_only", keys: int = 12) -> Any:
    return train_step(functools.partial(fastac.checkpoint, Block(*attends), policy=policy), inputs(keys))


BESIDE: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "an aten op": lambda: sdpa,
    "a custom op": lambda: support.custom_attention("beside_a_hidden_attention"),
    "attention without gradient": lambda: without_gradient,
    "one Function, two calls": lambda: TwiceInside.apply,
    "a wrapper": lambda: AttentionWithGraphInside.apply,
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_hidden_attention_beside_one_that_is_recorded(beside: str) -> None:
    """What recorded its calls is left alone."""
    shown = BESIDE[beside]()
    for calls in ((shown, hidden()), (hidden(), shown)):
        with pytest.raises(PolicyNotAppliedError, match="TritonAttention"):
            train(*calls)
    block = Block(shown, sdpa, shown)
    reference = train_step(functools.partial(block), inputs())
    support.assert_same(train_step(functools.partial(fastac.checkpoint, block), inputs()), reference)


def test_attention_over_frozen_text_right_after_a_hidden_one() -> None:
    """It makes no node: the newest one is that of the hidden Function."""
    text, attend = torch.randn(1, 2, 12, 8), hidden("FlashAttention")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = attend(query, key, value)
        return attended + sdpa(text, text, text)

    with pytest.raises(PolicyNotAppliedError, match="FlashAttention"):
        fastac.checkpoint(region, *inputs().values())


ATTENTIONS = (
    *("FlashFunc", "RingFlashFunc", "MaskedAttention", "_attention", "_fMHA", "NeighborhoodAttn2D", "QKNormAttention"),
    *("RopeAttention", "FlashAttnVarlenFunc", "FlashAttnQKVPackedFunc", "SelfAttention", "Selfattention"),
    *("FlashAttentionBias", "CutlassFna3DAutogradFn", "FlashMLA", "SageAttnFwd", "AttentionWithGate"),
    *("my_attention_forward", "block_sparse_attn_triton", "_varlen_attn", "fa3_fwd", "na3d", "fna_forward"),
)
OTHERS = (
    *("UlyssesAttentionAllToAll", "AttnBiasFunction", "_AttnInputScatter", "AttentionGate", "AttnRopeFunction"),
    *("FusedAttnQKNorm", "FusedMLP", "Flatten", "FlashRoPE", "AttnRoPE", "FlashSwiGLU", "FlashMoE", "AttnLoRA"),
    *("FlashMLP", "FlashFFTConv", "AttentionPool", "AttnModulate", "AttnScaleShift", "FlashNorm", "AttentionToAll"),
    *("AttnOutProj", "AttentionScores", "FlashCrossEntropyLoss", "AttnResidualAdd", "AttentionLayerNorm"),
    *("AttnAdaLN", "AttentionConcat", "AttnLn", "attention_mask_of", "attention_backward", "retention", "attn_rms"),
    *("attn_dropout_add", "attn_window_partition", "post_attention_layernorm"),
)


@pytest.mark.parametrize("name", [*ATTENTIONS, *OTHERS])
def test_names_of_functions(name: str) -> None:
    raises = pytest.raises(PolicyNotAppliedError, match=rf"{name}\b")
    with raises if name in ATTENTIONS else contextlib.nullcontext():
        train(sdpa, hidden(name))


class FirstAttention(torch.autograd.Function):
    """Takes any number of tensors. Its parameters have no names."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.number = len(tensors)
        return tensors[0] * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * 2, *[None] * (ctx.number - 1))


@pytest.mark.parametrize(
    ("shapes", "are_of_attention"),
    [
        *(([shape], True) for shape in ((1, 12, 3, 2, 8), (3, 1, 2, 12, 8), (12, 3, 2, 8))),  # qkv in one
        ([(1, 12, 2, 8), (1, 12, 2, 2, 8)], True),  # kv in one
        *(([(*range(2, dims + 1), 8)] * 3, True) for dims in (2, 5, 6)),  # of one head; the axes of a video
        ([(12, 8)], False),
        ([(1, 2, 12, 8)] * 2, False),
        ([(192,)] * 3, False),
    ],
)
def test_inputs_of_functions(shapes: Any, are_of_attention: bool) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    raises = pytest.raises(PolicyNotAppliedError, match="FirstAttention")
    with raises if are_of_attention else contextlib.nullcontext():
        fastac.checkpoint(lambda *given: FirstAttention.apply(*given), *tensors)


def test_only_what_the_policy_saves_counts() -> None:
    train(sdpa, hidden(), policy=fastac.Policy("attn_only", min_kv=13))
    with pytest.raises(PolicyNotAppliedError, match="TritonAttention"):
        train(sdpa, hidden(), policy=fastac.Policy("attn_only", min_kv=12))


def test_outputs_in_a_dataclass_are_looked_into() -> None:
    output, block = dataclasses.make_dataclass("Output", ["sample"]), Block(sdpa, hidden())
    with pytest.raises(PolicyNotAppliedError, match="TritonAttention"):
        fastac.checkpoint(lambda **named: output(block(**named)), **inputs())


def test_a_hidden_function_in_a_compiled_block() -> None:
    """dynamo traces it, so that no autograd node shows it: the eager look does."""
    torch._dynamo.reset()
    block = Block(sdpa, hidden())
    block.compile(backend="aot_eager")
    with pytest.raises(PolicyNotAppliedError, match="TritonAttention"):
        train_step(functools.partial(fastac.checkpoint, block), inputs())
