"""flex_attention that inductor compiles, alone or in a block: a call of its own, saved as any other.

On a CPU inductor has no backward of it. So the kernels here are plain math (tests/backends/flex_on_cpu.py), and
inductor compiles what surrounds them. One test runs inductor's own forward, and one all of it, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fastac
from fastac import PolicyNotAppliedError
from fastac.engine import releases
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP
from tests.compiled.steps import SmallBlock, broken, frozen_inputs, small_inputs
from tests.compiler import unfused
from tests.live_bytes import allocated
from tests.marks import skip_module_without
from tests.support import AttentionStack, relative_error, stack, train_step

skip_module_without(releases.FLEX)

TOKENS = 256


def is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def cross(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Over half of the keys, and then over all of them."""
    half = key.shape[2] // 2
    return flex_attention(flex_attention(query, key[:, :, :half], value[:, :, :half]).tanh(), key, value)


def masked(device: str = "cpu") -> Callable[..., Any]:
    mask = create_block_mask(is_causal, None, None, TOKENS, TOKENS, device=device)
    return lambda query, key, value: flex_attention(query, key, value, block_mask=mask)


def biased(device: str) -> Callable[..., Any]:
    bias = -torch.arange(TOKENS, device=device).float() / 10
    return lambda query, key, value: flex_attention(query, key, value, lambda score, b, h, q, k: score + bias[k])


ATTENTIONS: dict[str, tuple[Callable[[str], Callable[..., Any]], int]] = {
    "plain": (lambda device: flex_attention, 1),
    "block mask": (masked, 1),
    "score mod with a tensor": (biased, 1),
    "two shapes": (lambda device: cross, 2),
    "behind a graph break": (lambda device: broken(flex_attention), 1),  # as at a router of experts
}
"""Of a device: the attention, and how many calls it makes."""


def model(attend: Callable[..., Any] = flex_attention, layers: int = 2) -> AttentionStack:
    return stack(layers=layers, block=lambda: SmallBlock(attend, heads=1))  # on a GPU, heads need a dim of 16


def inputs() -> dict[str, torch.Tensor]:
    return small_inputs(TOKENS)


def assert_steps(
    built: torch.nn.Module, reference: support.Tensors, given: dict[str, Any], calls: int, error: float = 1e-5
) -> None:
    """Two steps, of which the first follows a compile: gradients of the reference, so many executions in each."""
    for _ in range(2):
        support.executions.clear()
        found = train_step(built, given)
        assert found.keys() == reference.keys()
        assert max(relative_error(found[name], reference[name]) for name in reference) < error
        assert support.executions == {COMPILED_OP: calls}


@pytest.fixture
def _trains_here() -> Iterator[None]:
    with flex_on_cpu.compiled(), unfused():
        yield


trains_here = pytest.mark.usefixtures("_trains_here")


@pytest.mark.slow
@trains_here
def test_a_model_of_diffusers_whose_backend_is_flex() -> None:
    """Its self-attention, and its cross-attention with a mask of diffusers."""
    built, given = support.build("WanTransformer3DModel")
    reference = train_step(built, given)
    built.set_attention_backend("flex")
    fastac.compile(built)
    assert_steps(built, reference, given, 4)


@pytest.mark.slow
@trains_here
def test_what_is_held() -> None:
    """The output and its statistics, to the byte."""

    def held(policy: str) -> int:
        compiler.reset()
        built = model()
        fastac.compile(built, policy, blocks="blocks")
        train_step(built, inputs())
        return allocated(lambda: built(**inputs()))

    statistics = TOKENS
    assert held("attn_only") - held("full") == 2 * 4 * (TOKENS * support.WIDTH + statistics)


@pytest.mark.slow
@trains_here
def test_compiled_by_torch_alone_in_eager_blocks() -> None:
    """Refused where inductor calls what it compiled through an op of its own, which may hold anything."""
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        built = model(torch.compile(flex_attention, options=flex_on_cpu.HIDDEN))
        fastac.enable(built, blocks="blocks")
        with pytest.raises(PolicyNotAppliedError, match=r"flex_attention.*fastac\.compile_attention"):
            built(**inputs())


@pytest.mark.slow
def test_inductors_own_kernel() -> None:
    """Its C++ kernel for the CPU, in blocks whose attention needs no gradient."""
    built, given = model(masked(), layers=1), frozen_inputs(inputs())
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(".out." in name)
    reference = train_step(built, given)
    fastac.compile(built, blocks="blocks", dynamic=True)
    with flex_on_cpu.compiled(own_kernels=True):
        assert_steps(built, reference, given, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("blocks", "behind a graph break"),
        ("alone", "two shapes"),
        *(pytest.param("blocks", name, marks=pytest.mark.slow) for name in list(ATTENTIONS)[:4]),
        pytest.param("alone", "behind a graph break", marks=pytest.mark.slow),
    ],
)
def test_a_step(way: str, name: str, device: str) -> None:
    """On a GPU by inductor's Triton kernels, forward and backward."""
    attend, calls = ATTENTIONS[name][0](device), ATTENTIONS[name][1]
    given = {argument: tensor.detach().to(device).requires_grad_() for argument, tensor in inputs().items()}
    on_gpu = device == "cuda"
    with nullcontext() if on_gpu else flex_on_cpu.registered():  # there compiled, here by its own math
        plain = model(attend).to(device)
        reference = train_step(torch.compile(plain) if on_gpu else plain, given)
        reference = {tensor.replace("_orig_mod.", ""): value for tensor, value in reference.items()}
    compiler.reset()
    # Around "plain" inductor's own kernels run.
    with nullcontext() if on_gpu or name == "plain" else unfused(), flex_on_cpu.compiled(own_kernels=on_gpu):
        built = model(attend if way == "blocks" else fastac.compile_attention(attend)).to(device)
        if way == "blocks":
            fastac.compile(built, blocks="blocks", fullgraph=name != "behind a graph break")
        else:
            fastac.enable(built, blocks="blocks")
        assert_steps(built, reference, given, 2 * calls, 1e-2 if on_gpu else 1e-5)


@pytest.mark.slow
@trains_here
def test_no_cache_of_compiled_code_brings_a_call_without_its_kernel() -> None:
    """The code of a block calls a kernel by a number, which means nothing to another process."""
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for _ in range(2):
            compiler.reset()
            built = model(layers=1)
            fastac.compile(built, blocks="blocks")
            train_step(built, inputs())
            assert counters["inductor"]["fxgraph_cache_hit"] == counters["aot_autograd"]["autograd_cache_hit"] == 0
