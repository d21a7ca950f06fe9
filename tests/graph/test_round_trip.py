"""A second compile of what was partitioned saves what the first partitioner saved: attention, bytes, gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from fastac import Policy, PolicyNotAppliedError, graph
from fastac.graph import saved_values, torch_private
from tests import support
from tests.compiler import fresh_compiler as fresh_compiler
from tests.compiler import kernel_folder as kernel_folder
from tests.compiler import unfused
from tests.graph.partitioned import (
    Partitioned,
    Watched,
    careless,
    compiled_again,
    gradients_of,
    min_cut,
    round_trip,
    small_stack,
)
from tests.support import CPU_ATTENTION, assert_same, code_blocks

SMALL = 0.3
"""A memory budget with which min-cut recomputes much more."""

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "round_trip.md"
REPLAY = graph.replaying_partitioner


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# What is saved again


@pytest.mark.parametrize(
    ("policy", "options", "attention"),
    [
        ("attn_only", {"budget": SMALL}, (2, 0)),
        ("attn_only", {"budget": SMALL, "cse": False}, (2, 0)),
        (Policy("attn_only", min_kv=6), {}, (2, 1)),  # 8 video tokens, 4 of text
    ],
    ids=["attn_only", "common subexpressions stay", "short attention is recomputed"],
)
def test_the_second_partition_is_the_first(policy: Any, options: dict[str, Any], attention: tuple[int, int]) -> None:
    model, args = small_stack()
    first, second, gradients = round_trip(model, args, graph.partitioner(policy), REPLAY, **options)
    assert second.figures == first.figures
    assert first.attention == attention
    assert same(gradients, gradients_of(model, model, args))


def test_dropout_is_drawn_once() -> None:
    first, second, _ = round_trip(*small_stack(dropout=0.2), graph.partitioner("attn_only"), REPLAY)
    assert second.figures == first.figures

    def draws(node: Node) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and "attention" not in node.name

    assert first.count("forward", draws) == second.count("forward", draws) == 3
    assert second.count("backward", draws) == 0


def test_partitioned_blocks_within_a_model() -> None:
    """Called twice, between layers that were not partitioned: these are left to min-cut."""
    block, args = small_stack()
    once, again = Watched(graph.partitioner("attn_only")), Watched(REPLAY)
    hidden = args[0].clone().requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        partitioned = Partitioned(block, (hidden, args[1]), once)
    project = torch.nn.Linear(16, 16)

    def model(inside: Any, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return project(inside(inside(F.gelu(project(video)), text), text.square()))

    gradients = gradients_of(block, compiled_again(lambda *args: model(partitioned, *args), again), args)
    expected = gradients_of(block, lambda *args: model(block, *args), args)
    assert again.split.attention == (4, 0)
    own = 5 * args[0].nbytes + args[1].nbytes  # around and between the two calls
    assert 2 * once.split.held_bytes < again.split.held_bytes <= 2 * once.split.held_bytes + own
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(gradients, expected, strict=True))


def without_copies(joint: GraphModule) -> None:
    """Take out copies that lay out nothing anew, as a pass of inductor's does: with a copy goes its mark."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        (source,) = node.all_input_nodes
        if node.meta["val"].stride() == source.meta["val"].stride():
            node.replace_all_uses_with(source)
            joint.graph.erase_node(node)
    joint.recompile()


def test_a_saved_copy_that_a_pass_took_out_is_found_by_its_readers() -> None:
    def saving_copies(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return graph.partitioner("attn_only")(joint, inputs, **options)

    class Copying(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x).sin().clone()).sin()

    model, args = Copying(8, 8), (torch.randn(4, 8),)
    first, second, gradients = round_trip(model, args, saving_copies, REPLAY, before=without_copies)
    assert any("clone" in node.name for node in first.saved)
    assert second.held_bytes == first.held_bytes
    assert same(gradients, gradients_of(model, model, args))


def test_an_op_that_is_decomposed_in_two_calls() -> None:
    """What was saved of it is found in both."""

    def norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.native_layer_norm(x, [8], None, None, 1e-5)[0]
        return output * 2, output

    x = torch.randn(4, 8)
    once = make_fx(norm)(x)
    graph.mark_saved(once, num_fwd_outputs=1)
    decompositions = get_decompositions([torch.ops.aten.native_layer_norm])
    with preserve_node_meta():
        twice = make_fx(lambda x: Interpreter(once).run(Interpreter(once).run(x)[0])[0], decompositions)(x)
    found = saved_values.find_saved(twice.graph)
    assert [len(nodes or ()) for nodes in found.values()] == [2]


# What is refused


def test_values_that_are_not_found_are_named() -> None:
    def forget(joint: GraphModule) -> None:
        for node in joint.graph.nodes:
            custom = node.meta.get("custom", {})
            mark = custom.get(saved_values.FORWARD_MARK)
            custom.pop(saved_values.BACKWARD_MARK, None)
            if mark is not None and "attention" in mark.target:
                custom.pop(saved_values.FORWARD_MARK)

    with pytest.raises(PolicyNotAppliedError, match=r"saved are not found in the joint graph: getitem.*custom"):
        round_trip(*small_stack(), graph.partitioner("attn_only"), REPLAY, before=forget)


def test_a_graph_without_marks_is_refused() -> None:
    with pytest.raises(PolicyNotAppliedError, match=r"carries a mark.*preserve_node_meta"):
        round_trip(*small_stack(), min_cut, REPLAY)


def test_a_second_partition_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = small_stack()
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        once = Partitioned(model, args, graph.partitioner("attn_only"))
    monkeypatch.setattr(torch_private, "min_cut", careless)
    with pytest.raises(PolicyNotAppliedError, match=r"differs from the first.*Recomputed then and saved now: \w+"):
        gradients_of(model, compiled_again(once, REPLAY), args)


# Inductor, and the guide


@pytest.mark.slow
def test_inductor_decomposes_and_saves_no_more() -> None:
    model, args = small_stack()
    reference = gradients_of(model, model, args)
    once, again = Watched(graph.partitioner("attn_only")), Watched(REPLAY)
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        partitioned = Partitioned(model, args, once)
    with torch._inductor.config.patch(custom_partitioner_fn=again), unfused():
        gradients = gradients_of(model, torch.compile(partitioned, backend="inductor"), args)
    scale = max(gradient.abs().max() for gradient in reference)
    assert all((a - b).abs().max() < 1e-4 * scale for a, b in zip(gradients, reference, strict=True))
    assert again.split.attention == once.split.attention == (2, 0)
    assert again.split.held_bytes <= once.split.held_bytes


@pytest.mark.slow
def test_the_code_of_the_guide_runs(attention_executions: Counter[str]) -> None:
    """The first block; the others do the same through inductor, as the test above."""
    names: dict[str, Any] = {}
    exec(compile(code_blocks(GUIDE, "python")[0], str(GUIDE), "exec"), names)
    assert attention_executions[CPU_ATTENTION] == 4
    model = names["model"]
    found = support.gradients(dict(model.named_parameters()))
    model.zero_grad()
    names["Video"](model)(*names["args"]).square().mean().backward()
    assert_same(found, support.gradients(dict(model.named_parameters())))
