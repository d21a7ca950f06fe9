"""fastac.compile: blocks compiled inside their checkpoints, with and without graph breaks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo.backends.debugging import aot_eager

import fastac
from fastac import FastacError
from tests import compiler, support
from tests.compiled.steps import EACH_WAY, WAYS, broken, small, small_inputs
from tests.compiler import reset
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import (
    AttentionBlock,
    AttentionStack,
    assert_same,
    executions_of,
    relative_error,
    stack,
    stack_inputs,
    train_step,
)

CALLS = 4  # self- and cross-attention in each of two blocks


def model(breaks: bool = False) -> AttentionStack:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return stack(block=lambda: AttentionBlock(attend=broken(sdpa) if breaks else sdpa))


def steps_of(run: Callable[..., Any], reference: support.Tensors) -> list[int]:
    """How many attention kernels each of three steps runs. They compute what the reference does."""
    return [executions_of(run, stack_inputs(), reference) for _ in range(3)]


@pytest.mark.parametrize("breaks", [False, True])
def test_attention_is_saved_where_a_graph_breaks(breaks: bool) -> None:
    """The first step runs one block once more, to look at its class. After that attention runs once a step.

    Nothing is compiled again by a second call.
    """
    reference = train_step(model(breaks), stack_inputs())
    compiled = model(breaks)
    first = fastac.compile(compiled, blocks="blocks", backend="aot_eager")
    assert steps_of(compiled, reference) == [CALLS + 2, CALLS, CALLS]
    graphs = compiler.compiled_so_far().graphs
    assert graphs >= 1
    assert bool(compiler.compiled_so_far().graph_breaks) == breaks
    assert fastac.compile(compiled, blocks="blocks", backend="aot_eager") == first
    assert_same(train_step(compiled, stack_inputs()), reference)
    assert compiler.compiled_so_far().graphs == graphs
    assert fastac.verify(compiled, **stack_inputs()).saved == CALLS


@NEEDS_COMPILED_MODELS
def test_a_model_that_is_compiled_as_a_whole_already() -> None:
    """Its checkpoints are inside compiled code."""
    reference = train_step(model(), stack_inputs())
    compiled = model()
    compiled.compile(backend="aot_eager")
    fastac.compile(compiled, blocks="blocks", backend="aot_eager")
    assert steps_of(compiled, reference) == [CALLS] * 3


def test_a_model_of_diffusers() -> None:
    """Other options compile again. Disabled, it stays compiled."""
    built, inputs = support.build("WanTransformer3DModel")
    keys, reference = list(built.state_dict()), train_step(built, inputs)
    for backend in ("eager", "aot_eager", "aot_eager"):
        made = fastac.compile(built, backend=backend)
        assert (made.backend, made.before, made.blocks) == (backend, (), {"WanTransformerBlock": 2})
    for _ in range(2):
        found = train_step(built, inputs)
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-6
    assert executions_of(built, inputs, found) == 4
    fastac.disable(built)
    assert list(built.state_dict()) == keys
    assert executions_of(built, inputs, found) == 4
    assert compiler.compiled_so_far().graphs >= 1
    assert not fastac.report(built).active


def test_blocks_that_are_compiled_stay_so() -> None:
    built, _ = support.build("WanTransformer3DModel")
    block = built.get_submodule("blocks.0")
    block.compile(backend="eager")
    theirs = block._compiled_call_impl
    made = fastac.compile(built, backend="aot_eager")
    assert (made.before, made.blocks) == (("blocks.0",), {"WanTransformerBlock": 1})
    assert "blocks.0 had been compiled before" in str(made)
    assert block._compiled_call_impl is theirs
    assert built.get_submodule("blocks.1")._compiled_call_impl is not None


def test_a_copy_has_its_own_weights() -> None:
    """A compiled function is bound to its block: a copy of the block must not call it."""
    built = stack()
    fastac.compile(built, blocks="blocks", backend="aot_eager")
    before = train_step(built, stack_inputs())
    for copy_of in (copy.deepcopy, support.pickled):
        copied = copy_of(built)
        assert executions_of(copied, stack_inputs(), before) == CALLS
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not torch.equal(train_step(copied, stack_inputs())["output"], before["output"])
        assert_same(train_step(built, stack_inputs()), before)


@pytest.mark.usefixtures("rows_as_before")
def test_what_only_eager_mode_shows_stays_eager() -> None:
    """A kernel that is visible by make_visible, as flash-attn 4's, would be recomputed in compiled code."""
    support.define_attention_op("of_flash_4")
    fastac.register(fastac.AttentionOp(backend="fa4", namespace=support.NAMESPACE, name="of_flash_4"))
    built, _ = support.build("WanTransformer3DModel")
    built.get_submodule("blocks.0.attn1").processor._attention_backend = "flash_4_hub"
    made = fastac.compile(built, backend="aot_eager")
    assert (made.blocks, made.eager) == ({"WanTransformerBlock": 1}, ("blocks.0",))
    assert "blocks.0 stayed eager" in str(made)


@pytest.mark.parametrize(
    "options",
    [{"policy": "most"}, {"max_autotune": True}, {"backend": "nonsense"}],
    ids=lambda options: next(iter(options)),
)
def test_refused_with_the_model_as_it_was(options: dict[str, Any]) -> None:
    """By fastac.enable, or by torch.compile for its options."""
    built = model()
    before = [(vars(module).copy(), module._compiled_call_impl) for module in built.modules()]
    with pytest.raises(
        (FastacError, RuntimeError, TypeError), match=str(next(iter(options.values()))) + "|max_autotune"
    ):
        fastac.compile(built, blocks="blocks", **options)
    assert [(vars(module), module._compiled_call_impl) for module in built.modules()] == before


# One thread compiles while another trains: "is something traced?" is asked per thread


@EACH_WAY
def test_eager_training_while_another_thread_compiles(way: str) -> None:
    """The eager steps run in the middle of the compile. The gradients of both threads are exact."""
    expected = train_step(stack(layers=1), stack_inputs())
    inside, go_on = Event(), Event()

    def gated(graph: torch.fx.GraphModule, examples: Any) -> Any:
        inside.set()
        assert go_on.wait(300)
        return aot_eager(graph, examples)

    compiled = WAYS[way](stack(layers=1, policy="attn_only"), gated)
    eager = stack(layers=1, policy="attn_only")
    with ThreadPoolExecutor(1) as other:
        steps = other.submit(lambda: [train_step(compiled, stack_inputs()) for _ in range(2)])
        try:
            assert inside.wait(300)
            for _ in range(3):
                assert executions_of(eager, stack_inputs(), expected) == 2
        finally:
            go_on.set()
        compiled_steps = steps.result()

    reset()
    compiled_expected = train_step(WAYS[way](stack(layers=1), "aot_eager"), stack_inputs())
    for found in compiled_steps:
        assert_same(found, compiled_expected)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_compiled_calls_are_those_of_their_thread(elsewhere: bool, attention_executions: Counter[str]) -> None:
    """A region that calls compiled code is run once more, eagerly. Whoever else listens to dynamo goes on, too."""
    compiled, seen = torch.compile(torch.sin, backend="eager"), []
    compiled(torch.ones(3))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        fastac.checkpoint(torch.cos, query)  # which listens, too, and ends first
        with ThreadPoolExecutor(1) as other:
            _ = other.submit(compiled, torch.ones(3)).result() if elsewhere else compiled(torch.ones(3))
        return F.scaled_dot_product_attention(query, key, value)

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    before = set_guard_complete_hook(theirs)
    try:
        train_step(small("attn_only", layers=1, attend=attend), small_inputs())
        assert attention_executions.total() == (1 if elsewhere else 2)
        assert seen == [True] * 2
        assert set_guard_complete_hook(theirs) is theirs
    finally:
        set_guard_complete_hook(before)
