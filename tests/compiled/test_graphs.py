"""The compiler runs a saved attention again: an error. By a memory budget, or a partitioner of the user's own.

And code that is compiled anew between forward and recompute.
"""

from __future__ import annotations

import re
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

LONG_ONLY = fastac.Policy("attn_only", min_kv=10)
"""Of the stack's attentions over 24 keys of video and 6 of text, saves the first."""

RAN_AGAIN = pytest.raises(PolicyNotAppliedError, match="ran again in the backward")


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


class RunsAgain(torch.autograd.Function):
    """An attention that runs its forward again in its backward."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value = (tensor.neg().neg() for tensor in ctx.saved_tensors)  # not merged with the forward's
        output, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, query, key, value, output, statistics, 0.0, False)


class TestAMemoryBudget:
    @EACH_WAY
    def test_is_an_error_in_the_first_step(self, way: str) -> None:
        model = WAYS[way](small("attn_only", layers=1), "aot_eager")
        with budget(0.0), RAN_AGAIN as error:
            train_step(model, small_inputs())
        assert "activation_memory_budget is, or was, 0. Set it to 1" in str(error.value)

    def test_in_code_that_was_compiled_later(self) -> None:
        """The block's attention is known by then. Its code is new."""
        model = stack(policy="attn_only")
        for _ in range(2):
            train_step(model, stack_inputs())
        compile_blocks(model, "aot_eager")
        with budget(0.0), RAN_AGAIN:
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
    with RAN_AGAIN as error:
        train_step(compile_whole(model, "aot_eager"), small_inputs())
    assert re.search(r"nested_compile_region.*fastac\.compile", str(error.value))
    assert "budget" not in str(error.value)
    model = stack(block=Nested)
    fastac.compile(model, blocks="blocks", backend="aot_eager")
    train_step(model, small_inputs())
    assert executions_of(model, small_inputs(), train_step(stack(block=Nested), small_inputs())) == 2


@pytest.mark.parametrize("beside", ["full", LONG_ONLY])
@NEEDS_COMPILED_MODELS
def test_a_partitioner_that_recomputes_what_is_saved(beside: Any) -> None:
    """As many calls may run again as another block's policy recomputes, and no more."""
    model = stack()
    fastac.enable(model, {"blocks.0": beside, "*": "attn_only"}, blocks="blocks")
    compile_whole(model, with_forgetful)
    with RAN_AGAIN:
        train_step(model, stack_inputs())


@NEEDS_COMPILED_MODELS
class TestNothingIsWrong:
    """Attention that runs again in the backward of a graph, and may."""

    def test_in_a_checkpoint_of_the_users_own(self) -> None:
        mine, other = stack(policy="attn_only", layers=1), stack(policy="none", layers=1)

        def both(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return checkpoint(other, mine(video, text), text, use_reentrant=False)

        compiled = torch.compile(both, backend="aot_eager")
        for _ in range(2):
            assert executions_of(compiled, stack_inputs()) == 2 + 2 + 2

    def test_in_the_backward_of_an_attention(self) -> None:
        model, plain = stack(policy="attn_only", layers=1), stack(policy="none", layers=1)
        model.blocks[0].attend = plain.blocks[0].attend = RunsAgain.apply
        expected = train_step(plain, stack_inputs())
        compile_whole(model, "aot_eager")
        assert_same(train_step(model, stack_inputs()), expected)
        assert executions_of(model, stack_inputs()) == 4

    def test_in_a_second_backward(self) -> None:
        """What one block recomputes in both counts for each."""
        model = stack()
        fastac.enable(model, {"blocks.0": "attn_only", "*": LONG_ONLY}, blocks="blocks")
        compile_whole(model, "aot_eager")
        with torch._functorch.config.patch(donated_buffer=False):
            output = model(**stack_inputs()).square().sum()
            output.backward(retain_graph=True)
            output.backward()


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
