"""flex_attention that inductor compiles, alone or in a block: a call of its own, saved as any other.

On a CPU inductor has no backward of it. So the kernels here are plain math (tests/backends/flex_on_cpu.py), and
inductor compiles what surrounds them. One test runs inductor's own forward, and one all of it, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fastac
from fastac import PolicyNotAppliedError
from fastac.compiled import flex as compiled_flex
from fastac.compiled import torch_private
from fastac.engine import releases
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP
from tests.compiled.steps import SmallBlock, broken, frozen_inputs, small, small_inputs
from tests.compiler import unfused
from tests.live_bytes import allocated
from tests.marks import skip_module_without
from tests.support import AttentionStack, relative_error, stack, train_step

skip_module_without(releases.FLEX)

pytestmark = pytest.mark.slow  # inductor

TOKENS = 256

FUSED = "plain"
"""The attention around which inductor's own kernels run."""


@pytest.fixture(autouse=True)
def _count() -> None:
    support.executions.clear()


def is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def cross(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Over half of the keys, and then over all of them."""
    half = key.shape[2] // 2
    return flex_attention(flex_attention(query, key[:, :, :half], value[:, :, :half]).tanh(), key, value)


def masked(device: str = "cpu") -> Callable[..., Any]:
    masks = {n: create_block_mask(is_causal, None, None, n, n, device=device) for n in (128, TOKENS)}
    return lambda query, key, value: flex_attention(query, key, value, block_mask=masks[query.shape[2]])


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
    return small("none", layers, attend)


def inputs() -> dict[str, torch.Tensor]:
    return small_inputs(TOKENS)


def eagerly(built: torch.nn.Module, given: dict[str, Any]) -> support.Tensors:
    """A step with flex_attention's own math, uncompiled."""
    with flex_on_cpu.registered():
        found = train_step(built, given)
    compiler.reset()
    support.executions.clear()
    return found


def assert_steps(built: torch.nn.Module, reference: support.Tensors, given: dict[str, Any], calls: int) -> None:
    """Two steps, of which the first follows a compile: gradients of the reference, so many executions in each."""
    for _ in range(2):
        support.executions.clear()
        found = train_step(built, given)
        assert found.keys() == reference.keys()
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
        assert support.executions == {COMPILED_OP: calls}


@pytest.fixture
def _trains_here() -> Iterator[None]:
    with flex_on_cpu.compiled():
        yield


trains_here = pytest.mark.usefixtures("_trains_here")


@trains_here
@unfused()
def test_a_model_of_diffusers_whose_backend_is_flex() -> None:
    """Its self-attention, and its cross-attention with a mask of diffusers."""
    built, given = support.build("WanTransformer3DModel")
    reference = train_step(built, given)
    built, given = support.build("WanTransformer3DModel")
    built.set_attention_backend("flex")
    fastac.compile(built)
    assert_steps(built, reference, given, 4)


@trains_here
class TestSaved:
    @unfused()
    def test_what_is_held(self) -> None:
        """The output and its statistics, to the byte."""

        def held(policy: str) -> int:
            compiler.reset()
            built = model()
            fastac.compile(built, policy, blocks="blocks")
            train_step(built, inputs())
            return allocated(lambda: built(**inputs()))

        statistics = 2 * TOKENS
        assert held("attn_only") - held("full") == 2 * 4 * (TOKENS * support.WIDTH + statistics)


@trains_here
def test_compiled_by_torch_alone_in_eager_blocks() -> None:
    """Refused where inductor calls what it compiled through an op of its own, which may hold anything."""
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        built = model(torch.compile(flex_attention, options=flex_on_cpu.HIDDEN))
        fastac.enable(built, blocks="blocks")
        with pytest.raises(PolicyNotAppliedError, match=r"flex_attention.*fastac\.compile_attention"):
            built(**inputs())


@contextmanager
def counted_kernels() -> Iterator[list[int]]:
    """Counts the executions of what inductor, or its stand-in, makes of flex_attention, in place."""
    executed: list[int] = []
    compile_graph = torch_private.compile_graph

    def counted(*given: Any) -> Any:
        kernel = compile_graph(*given)

        def run(tensors: list[Any]) -> Any:
            executed.append(1)
            return kernel(tensors)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "compile_graph", counted)
        yield executed


def test_inductors_own_kernel() -> None:
    """Its C++ kernel for the CPU, in blocks whose attention needs no gradient."""
    attend = masked()

    def frozen() -> AttentionStack:
        built = model(attend, layers=1)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(".out." in name)
        return built

    given = frozen_inputs(inputs())
    reference = train_step(frozen(), given)
    with counted_kernels() as executed:
        built = frozen()
        fastac.compile(built, blocks="blocks", dynamic=True)
        for _ in range(2):
            executed.clear()
            found = train_step(built, given)
            assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
            assert len(executed) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("way", "name"),
    [  # soak: its attention is seen in blocks, its way with other attentions
        *(("blocks", name) for name in ATTENTIONS),
        *(("alone", name) for name in ("two shapes", "behind a graph break")),
        *(
            pytest.param("alone", name, marks=pytest.mark.soak)
            for name in ("plain", "block mask", "score mod with a tensor")
        ),
    ],
)
def test_a_step(way: str, name: str, device: str) -> None:
    """On a GPU by inductor's Triton kernels, forward and backward."""
    attend, calls = ATTENTIONS[name][0](device), ATTENTIONS[name][1]
    given = {argument: tensor.detach().to(device).requires_grad_() for argument, tensor in inputs().items()}

    def build(attend: Callable[..., Any]) -> AttentionStack:
        return stack(block=lambda: SmallBlock(attend, heads=1)).to(device)  # on a GPU, heads need a dim of 16

    if device == "cuda":
        reference = train_step(torch.compile(build(attend)), given)
        reference = {tensor.replace("_orig_mod.", ""): value for tensor, value in reference.items()}
    else:
        reference = eagerly(build(attend), given)
    around = nullcontext() if device == "cuda" or name == FUSED else unfused()
    with around, flex_on_cpu.compiled() if device == "cpu" else nullcontext(), counted_kernels() as executed:
        if way == "blocks":
            built = build(attend)
            fastac.compile(built, blocks="blocks", fullgraph=name != "behind a graph break")
        else:
            built = build(fastac.compile_attention(attend))
            fastac.enable(built, blocks="blocks")
        for _ in range(2):
            executed.clear()
            found = train_step(built, given)
            assert found.keys() == reference.keys()
            worst = max(relative_error(found[tensor], reference[tensor]) for tensor in reference)
            assert worst < (1e-2 if device == "cuda" else 1e-5)
            assert len(executed) == 2 * calls


@trains_here
@unfused()
def test_no_cache_of_compiled_code_brings_a_call_without_its_kernel() -> None:
    """The code of a block calls a kernel by a number, which means nothing to another process."""
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            compiled_flex._kernels.clear()  # as in a new process
            built = model(layers=1)
            fastac.compile(built, blocks="blocks")
            support.executions.clear()
            train_step(built, inputs())
            assert support.executions == {COMPILED_OP: 1}
