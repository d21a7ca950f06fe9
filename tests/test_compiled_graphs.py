"""What the compiler can do to a policy behind fastac's back is an error: never a second attention that nobody notices.

A memory budget, a partitioner of the user's own, code that is compiled anew between forward and recompute. Each test
fails when its guard in fastac/graphs.py is taken out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastac
from fastac import PolicyNotAppliedError
from fastac.compile import graphs
from fastac.engine import interception
from tests import support
from tests.marks import slow
from tests.support import assert_same, stack, stack_inputs, train_step
from tests.test_compile import EACH_WAY, WAYS, compile_blocks, compile_whole, reset
from tests.test_compile import fresh_compiler as fresh_compiler
from tests.test_compile import kernel_folder as kernel_folder

EACH_BACKEND = pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
LONG_ONLY = fastac.Policy("attn_only", min_kv=10)
"""Of the stack's attentions over 24 keys of video and 6 of text, saves the first."""


def budget(value: float) -> Any:
    """What AOT may keep of a graph's activations."""
    return torch._functorch.config.patch(activation_memory_budget=value)


def forgetful(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """A partitioner that recomputes every attention, whatever was said."""
    for node in joint.graph.nodes:
        if "scaled_dot_product" in str(node.target) and "backward" not in str(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def run_as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that runs the graph."""
    return graph.forward


with_forgetful = aot_autograd(fw_compiler=run_as_it_is, partition_fn=forgetful)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention, and something beside it for a compiler."""
    return F.scaled_dot_product_attention(query, key, value) * 1.0


class TwoOutputs(support.AttentionStack):
    """Its blocks return numbers before what they compute."""

    class Block(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
            return torch.zeros(2), super().forward(video, text)

    def __init__(self) -> None:
        super().__init__(layers=1)
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([self.Block()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            _, video = fastac.checkpoint(block, video, text)
        return video


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


def executions(model: torch.nn.Module, inputs: Any) -> int:
    """How many attention kernels one training step runs."""
    support.count_cpu_attention()
    support.executions.clear()
    train_step(model, inputs)
    return support.executions.total()


class TestMemoryBudget:
    @EACH_BACKEND
    def test_around_compiled_blocks(self, backend: str) -> None:
        """From the first block on, in its first step."""
        model = compile_blocks(stack(policy="attn_only", layers=1), backend)
        said = (
            r"(?s)attn_only: aten\._scaled_dot_product_\w+\.default over \d+ keys ran again in the backward.*It is 0\.0"
        )
        with budget(0.0), pytest.raises(PolicyNotAppliedError, match=said):
            train_step(model, stack_inputs())

    @pytest.mark.parametrize("value", [0.0, 0.5])
    @EACH_BACKEND
    def test_in_a_compiled_model(self, backend: str, value: float) -> None:
        model = compile_whole(stack(policy="attn_only"), backend)
        said = rf"activation_memory_budget is {value}, by which .*fastac\.inform_partitioner"
        with budget(value), pytest.raises(PolicyNotAppliedError, match=said):
            train_step(model, stack_inputs())

    def test_of_an_annotated_region(self) -> None:
        model = stack(policy="attn_only")

        def step(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.region_activation_memory_budget(0.0):
                return model(video, text)

        said = r"torch\.autograd\.graph\.region_activation_memory_budget is 0\.0"
        with pytest.raises(PolicyNotAppliedError, match=said):
            torch.compile(step, backend="aot_eager")(**stack_inputs())

    @EACH_WAY
    def test_one_that_leaves_everything_is_no_matter(self, way: str) -> None:
        model = WAYS[way](stack(policy="attn_only"), "aot_eager")
        with budget(1.0):
            train_step(model, stack_inputs())
            assert executions(model, stack_inputs()) == 4

    def test_what_the_policy_leaves_to_recomputation_may_run_again(self) -> None:
        """The partitioner knows that attention is work: it gives up the short one, which the policy does not save."""
        model = compile_blocks(stack(policy=LONG_ONLY), "aot_eager")
        inputs = stack_inputs()
        expected = train_step(stack(policy="none"), inputs)
        with budget(0.7):
            assert_same(train_step(model, inputs), expected)
            assert executions(model, inputs) in (6, 8)  # the short ones once or twice more

    def test_compiled_anew_under_one(self) -> None:
        """The block's attention is known by then, and its code is new."""
        model = compile_blocks(stack(policy="attn_only"), "aot_eager")
        for _ in range(2):
            train_step(model, stack_inputs())
        reset()
        with budget(0.0), pytest.raises(PolicyNotAppliedError, match="ran again"):
            train_step(model, stack_inputs())

    @pytest.mark.parametrize("part", ["blocks", "inside"])
    def test_in_code_that_was_compiled_after_eager_steps(self, part: str) -> None:
        """The block's attention is known by then, from regions without compiled code."""
        model = stack(policy="attn_only")
        train_step(model, stack_inputs())
        if part == "blocks":
            compile_blocks(model, "aot_eager")
        else:
            for block in model.blocks:
                block.attend = torch.compile(lambda *args: attend(*args), backend="aot_eager")
        with budget(0.0), pytest.raises(PolicyNotAppliedError, match="ran again"):
            train_step(model, stack_inputs())

    def test_in_a_block_whose_first_output_has_no_gradient(self) -> None:
        model = TwoOutputs()
        train_step(model, stack_inputs())
        for block in model.blocks:
            block.compile(backend="aot_eager")
        with budget(0.0), pytest.raises(PolicyNotAppliedError, match="ran again"):
            train_step(model, stack_inputs())

    @pytest.mark.parametrize("place", [0, 2])
    def test_in_one_of_the_layers_that_a_function_runs(self, place: int) -> None:
        """A function is no block: each of its calls may be of another layer, with a graph of its own."""

        class Scaled(support.AttentionBlock):
            scale = ""

            def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
                return super().forward(video, text) * len(self.scale)

        def run(layer: torch.nn.Module, video: torch.Tensor, text: torch.Tensor) -> Any:
            return layer(video, text)

        layers, inputs = [Scaled() for _ in range(3)], stack_inputs()
        for number, layer in enumerate(layers):
            layer.scale = "x" * (number + 1)
        video = inputs["video"].requires_grad_()
        for number, layer in enumerate(layers):
            layer.compile(backend="aot_eager")
            with budget(0.0 if number == place else 1.0):
                layer(video, inputs["text"]).sum().backward()
        hidden = video
        for layer in layers:
            hidden = fastac.checkpoint(run, layer, hidden, inputs["text"])
        with pytest.raises(PolicyNotAppliedError, match="ran again"):
            hidden.sum().backward()

    def test_of_somebody_elses_model(self) -> None:
        """Only graphs with checkpointed regions in them, or around them, are fastac's business."""
        mine = compile_blocks(stack(policy="attn_only"), "aot_eager")
        inputs = stack_inputs()
        train_step(mine, inputs)
        other = compile_blocks(stack(policy="none"), "aot_eager")
        with budget(0.0):
            torch._dynamo.reset()
            assert executions(other, inputs) == 8
        torch._dynamo.reset()
        mine_whole = compile_whole(stack(policy="attn_only"), "aot_eager")
        assert executions(mine_whole, inputs) == 4
        torch._dynamo.reset()  # and dynamo counts compilations from the beginning
        other_whole = compile_whole(stack(policy="none"), "aot_eager")
        with budget(0.0):
            assert executions(other_whole, inputs) == 8


class TestPartitioner:
    def test_that_recomputes_what_is_saved(self) -> None:
        model = stack(policy="attn_only")
        model.compile(backend=with_forgetful, dynamic=False)
        with pytest.raises(PolicyNotAppliedError, match=r"ran again .* a partitioner of your own"):
            train_step(model, stack_inputs())

    def test_that_does_so_beside_a_block_that_saves_nothing(self) -> None:
        model = stack(policy="none")
        fastac.enable(model, {"blocks.0": "full", "*": "attn_only"}, blocks="blocks")
        model.compile(backend=with_forgetful, dynamic=False)
        with pytest.raises(PolicyNotAppliedError, match="ran again"):
            train_step(model, stack_inputs())

    def test_that_recomputes_only_what_is_not_saved(self) -> None:
        model = stack(policy=LONG_ONLY)
        model.compile(backend="aot_eager", dynamic=False)
        train_step(model, stack_inputs())
        assert executions(model, stack_inputs()) == 6

    def test_what_one_block_saves_and_another_does_not(self) -> None:
        """As many calls as were left to recomputation may run again, and no more."""
        policies = {"blocks.0": LONG_ONLY, "*": "attn_only"}
        inputs = stack_inputs()
        for backend, works in (("aot_eager", True), (with_forgetful, False)):
            reset()
            model = stack(policy="none")
            fastac.enable(model, policies, blocks="blocks")
            model.compile(backend=backend, dynamic=False)
            if works:
                train_step(model, inputs)
                assert executions(model, inputs) == 4 + 1
            else:
                with pytest.raises(PolicyNotAppliedError, match="ran again"):
                    train_step(model, inputs)

    def test_policies_per_block(self) -> None:
        """A block that is checkpointed fully runs its attention again, beside others that do not."""
        model = stack(layers=3, policy="none")
        fastac.enable(model, {"blocks.0": "full", "blocks.1": LONG_ONLY, "*": "attn_only"}, blocks="blocks")
        compile_whole(model, "aot_eager")
        inputs = stack_inputs()
        train_step(model, inputs)
        assert executions(model, inputs) == 6 + 2 + 1
        assert_same(train_step(model, inputs), train_step(stack(layers=3, policy="none"), inputs))


class TestNothingIsWrong:
    """Attention that runs again in the backward of a graph, and may."""

    @pytest.mark.parametrize("selective", [False, True], ids=["checkpoint", "selective checkpoint"])
    def test_in_a_checkpoint_of_the_users_own(self, selective: bool) -> None:
        mine, other = stack(policy="attn_only"), stack(policy="none", layers=1)
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, products)
        options = {"context_fn": contexts} if selective else {}

        def both(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return checkpoint(other, mine(video, text), text, use_reentrant=False, **options)

        both.parameters = mine.parameters  # type: ignore[attr-defined]
        support.count_cpu_attention()
        torch.compile(both, backend="aot_eager")(**stack_inputs()).square().sum().backward()
        support.executions.clear()
        torch.compile(both, backend="aot_eager")(**stack_inputs()).square().sum().backward()
        assert support.executions.total() == 4 + 2 + 2

    def test_in_the_backward_of_an_attention(self) -> None:
        """As diffusers' context parallel has it."""
        model, plain = stack(policy="attn_only", layers=1), stack(policy="none", layers=1)
        model.blocks[0].attend = plain.blocks[0].attend = RunsAgain.apply
        expected = train_step(plain, stack_inputs())
        compile_whole(model, "aot_eager")
        assert_same(train_step(model, stack_inputs()), expected)
        assert executions(model, stack_inputs()) == 4

    def test_in_a_second_backward(self) -> None:
        """What one block recomputes in both counts for each."""
        model = stack(policy="none")
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

    def test_with_another_budget_is_an_error(self) -> None:
        """Other tensors are saved in recompute than in the forward: torch's own check."""
        model = compile_blocks(stack(policy="attn_only"), "aot_eager")
        inputs = stack_inputs()
        train_step(model, inputs)
        output = model(**inputs)
        reset()
        with budget(0.0), pytest.raises((PolicyNotAppliedError, torch.utils.checkpoint.CheckpointError)):
            output.square().sum().backward()

    def test_for_a_second_size_in_flight(self) -> None:
        """Two forwards of different sizes before the backward of both: the first's recompute may meet other code."""
        model, plain = compile_blocks(stack(policy="attn_only"), "aot_eager", None), stack(policy="none")
        small, large = stack_inputs(), stack_inputs(batch=2)
        for _ in range(2):
            for one in (model, plain):
                one.zero_grad()
            support.count_cpu_attention()
            support.executions.clear()
            (model(**small).square().sum() + model(**large).square().sum()).backward()
            count = support.executions.total()
            (plain(**small).square().sum() + plain(**large).square().sum()).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)
        assert count == 8


@pytest.mark.slow
def test_a_warm_cache_spares_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are made, and told of in the report, while a graph is traced: with checkpointed regions in it always."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = []
    caches = (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    )
    with caches[0], caches[1]:
        for _ in range(2):
            reset()
            model = compile_whole(stack(policy="attn_only"), "inductor")
            train_step(model, stack_inputs())
            counts.append(sum(len(traced.calls) for traced in graphs._traced.values()))
            assert executions(model, stack_inputs()) == 4
    assert counts == [4, 4]


def test_nothing_is_looked_at_before_something_was_compiled() -> None:
    train_step(stack(policy="attn_only"), stack_inputs())
    assert graphs._ran_again not in interception.watchers
