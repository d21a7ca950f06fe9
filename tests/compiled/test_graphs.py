"""The compiler would run a saved attention again: an error. By a memory budget, or a partitioner of the user's own.

And code that is compiled anew between forward and recompute.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import fastac
from fastac import PolicyNotAppliedError
from tests import support
from tests.compiled.steps import (
    EACH_WAY,
    WAYS,
    compile_blocks,
    compile_whole,
    frozen_inputs,
    small,
    small_inputs,
)
from tests.compiler import reset
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import assert_same, executions_of, stack, stack_inputs, train_step

RAN_AGAIN = pytest.raises(PolicyNotAppliedError, match="ran again in backward, called by CompiledFunctionBackward")


def budget(value: float) -> Any:
    """What AOT may keep of a graph's activations."""
    return torch._functorch.config.patch(activation_memory_budget=value)


def forgetful(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """A partitioner that recomputes every attention."""
    for node in joint.graph.nodes:
        if "scaled_dot_product" in str(node.target) and "backward" not in str(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
    return min_cut_rematerialization_partition(joint, inputs, **options)


with_forgetful = aot_autograd(fw_compiler=lambda graph, _: graph.forward, partition_fn=forgetful)


class TestAMemoryBudget:
    @EACH_WAY
    @pytest.mark.parametrize("value", [0.0, 0.5])
    def test_is_an_error_in_the_first_step(self, way: str, value: float) -> None:
        """In a graph while it is traced, in compiled blocks in the backward."""
        model = WAYS[way](small("attn_only", layers=1), "aot_eager")
        with budget(value), pytest.raises(PolicyNotAppliedError, match="activation_memory_budget") as error:
            train_step(model, small_inputs())
        assert f"is {value:g}" in str(error.value)
        assert "Set it to 1" in str(error.value)

    @NEEDS_COMPILED_MODELS
    @pytest.mark.parametrize("around", ["the model", "the block"])
    def test_of_a_part_of_the_model(self, around: str) -> None:
        model = stack(policy="attn_only", layers=1)
        annotated = model if around == "the model" else model.blocks[0]
        forward = annotated.forward

        def under_budget(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.region_activation_memory_budget(0.0):
                return forward(*args, **kwargs)

        annotated.forward = under_budget
        with pytest.raises(PolicyNotAppliedError, match="activation_memory_budget is 0"):
            train_step(compile_whole(model, "aot_eager"), stack_inputs())

    def test_in_code_that_was_compiled_later(self) -> None:
        """The block's attention is known by then. Its code is new."""
        model = stack(policy="attn_only")
        for _ in range(2):
            train_step(model, stack_inputs())
        compile_blocks(model, "aot_eager")
        with budget(0.0), RAN_AGAIN:
            train_step(model, stack_inputs())

    def test_of_code_that_was_compiled_before(self) -> None:
        """The budget is 1 again when a region first runs the code."""
        model = compile_blocks(stack(policy="none"), "aot_eager")
        with budget(0.0):
            train_step(model, stack_inputs())
        model.policy = "attn_only"
        with RAN_AGAIN:
            train_step(model, stack_inputs())

    @NEEDS_COMPILED_MODELS
    def test_of_a_model_of_others_is_theirs(self) -> None:
        """Only graphs with checkpointed regions in or around them are checked."""
        for way in (compile_blocks, compile_whole):
            train_step(way(small("attn_only", layers=1), "aot_eager"), small_inputs())
            torch._dynamo.reset()  # and dynamo counts compilations from the beginning
            with budget(0.0):
                assert executions_of(way(small("none", layers=1), "aot_eager"), small_inputs()) == 2


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(support.WIDTH))

    @torch.compiler.nested_compile_region
    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        scaled = (video * self.scale)[None]
        return F.scaled_dot_product_attention(scaled, scaled, scaled)[0]


@NEEDS_COMPILED_MODELS
def test_attention_in_a_nested_region() -> None:
    """The error names it, and the way that saves."""
    model = stack(block=Nested)
    fastac.enable(model, blocks="blocks")
    with pytest.raises(PolicyNotAppliedError, match=r"nested_compile_region.*\n?.*fastac\.compile"):
        train_step(compile_whole(model, "aot_eager"), small_inputs())
    model = stack(block=Nested)
    fastac.compile(model, blocks="blocks", backend="aot_eager")
    train_step(model, small_inputs())
    assert executions_of(model, small_inputs(), train_step(stack(block=Nested), small_inputs())) == 2


def test_a_partitioner_that_recomputes_what_is_saved() -> None:
    model = compile_blocks(stack(policy="attn_only"), with_forgetful)
    with RAN_AGAIN:
        train_step(model, stack_inputs())


@NEEDS_COMPILED_MODELS
def test_a_checkpoint_of_the_users_own_in_the_graph() -> None:
    """Its attention runs again, and may."""
    mine, other = stack(policy="attn_only", layers=1), stack(policy="none", layers=1)

    def both(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return checkpoint(other, mine(video, text), text, use_reentrant=False)

    compiled = torch.compile(both, backend="aot_eager")
    for _ in range(2):
        assert executions_of(compiled, stack_inputs()) == 2 + 2 + 2


class TestRecompilation:
    """Between a region's forward and its recompute."""

    def test_of_everything(self) -> None:
        model = compile_blocks(stack(policy="attn_only"), "aot_eager")
        inputs = stack_inputs()
        expected = train_step(stack(policy="none"), inputs)
        train_step(model, inputs)
        support.count_cpu_attention()
        support.executions.clear()

        def compile_anew(loss: torch.Tensor) -> None:
            reset()
            loss.backward()

        assert_same(train_step(model, inputs, backward=compile_anew), expected)
        assert support.executions.total() == 4

    def test_for_a_second_size_in_flight(self) -> None:
        """Two forwards of different sizes, then their backward: the first recompute may run other code."""

        def in_two_sizes(model: Any) -> Any:
            forward = model.forward
            model.forward = lambda video, text: [forward(video, text), forward(video.tile(2, 1, 1), text.tile(2, 1, 1))]
            return model

        inputs = frozen_inputs(stack_inputs())
        expected = train_step(in_two_sizes(stack(layers=1)), inputs)
        model = in_two_sizes(compile_blocks(stack(layers=1, policy="attn_only"), "aot_eager", None))
        assert_same(train_step(model, inputs), expected)
        assert executions_of(model, inputs, expected) == 4
