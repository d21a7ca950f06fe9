"""A second compile of what was partitioned saves what the first partitioner saved: attention, bytes, gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import fastac
from fastac import FastacError, Policy, PolicyNotAppliedError, graph
from fastac.graph import internals, marks
from fastac.graph import round_trip as round_trip_module
from tests.graph.partitioned import (
    Llama,
    Partitioned,
    Watched,
    compiled_again,
    gradients_of,
    min_cut,
    plain_linear,
    round_trip,
)
from tests.marks import slow
from tests.support import CPU_ATTENTION, AttentionBlock, build

SMALL = 0.3
"""A memory budget that makes min-cut recompute much more than it does by itself."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


class Stack(torch.nn.Module):
    """Two blocks with self- and cross-attention."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(AttentionBlock(dropout=dropout) for _ in range(layers))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = block(video, text)
        return video


class TinyWan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.inputs = build("WanTransformer3DModel")

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(*args, return_dict=False)[0]


def stack() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    return Stack(), (torch.randn(2, 8, 16), torch.randn(2, 4, 16))


def wan() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    model = TinyWan()
    return model, tuple(model.inputs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states"))


def llama() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Llama(2, linear=plain_linear), (torch.randn(2, 32, 64),)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# What is saved again


@pytest.mark.parametrize(
    ("make", "cse"),
    [
        (stack, True),
        (llama, False),
        pytest.param(stack, False, marks=pytest.mark.slow),
        pytest.param(llama, True, marks=pytest.mark.slow),
        pytest.param(wan, True, marks=pytest.mark.slow),
    ],
)
def test_the_second_partition_is_the_first(make: Any, cse: bool) -> None:
    model, args = make()
    reference = gradients_of(model, model, args)
    first, second, gradients = round_trip(
        model, args, graph.partitioner("attn_only"), graph.replaying_partitioner, budget=SMALL, cse=cse
    )
    assert second.figures == first.figures
    assert first.attention[0] > 0
    assert first.attention[1] == 0
    assert same(gradients, reference)


@pytest.mark.parametrize("make", [stack, *slow(llama)])
def test_min_cut_decides_anew_without_it(make: Any) -> None:
    model, args = make()
    first, second, _ = round_trip(model, args, graph.partitioner("attn_only"), min_cut, budget=SMALL)
    assert second.held_bytes > 1.2 * first.held_bytes


@pytest.mark.slow
def test_attention_runs_again_without_it() -> None:
    model, args = stack()
    watched = Watched(min_cut)
    with torch._functorch.config.patch(activation_memory_budget=0.05):
        gradients_of(model, compiled_again(Partitioned(model, args, Watched(min_cut)), watched), args)
    assert watched.split.attention == (4, 4)
    torch._dynamo.reset()
    watched = Watched(graph.replaying_partitioner)
    once = Partitioned(model, args, graph.partitioner("attn_only"))
    with torch._functorch.config.patch(activation_memory_budget=0.05):
        gradients_of(model, compiled_again(once, watched), args)
    assert watched.split.attention == (4, 0)


def test_kernels_run_as_often_as_the_graphs_say(attention_executions: Counter[str]) -> None:
    model, args = stack()
    once = Partitioned(model, args, graph.partitioner("attn_only"))
    function = compiled_again(once, graph.replaying_partitioner)
    gradients_of(model, function, args)
    attention_executions.clear()
    gradients_of(model, function, args)
    assert attention_executions[CPU_ATTENTION] == 4


def test_short_attention_is_recomputed_in_both() -> None:
    model, args = stack()
    reference = gradients_of(model, model, args)
    policy = Policy("attn_only", min_kv=6)  # 8 video tokens, 4 of text
    first, second, gradients = round_trip(model, args, graph.partitioner(policy), graph.replaying_partitioner)
    assert first.attention == second.attention == (4, 2)
    assert second.held_bytes == first.held_bytes
    assert same(gradients, reference)


def test_full_saves_no_attention() -> None:
    model, args = stack()
    first, second, gradients = round_trip(model, args, graph.partitioner("full"), graph.replaying_partitioner)
    assert first.attention == second.attention == (4, 4)
    assert same(gradients, gradients_of(model, model, args))


def test_dropout_is_drawn_once() -> None:
    model, args = Stack(dropout=0.2), stack()[1]
    first, second, _ = round_trip(model, args, graph.partitioner("attn_only"), graph.replaying_partitioner)
    assert second.figures == first.figures

    def draws(node: Node) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and "attention" not in node.name

    assert first.count("forward", draws) == second.count("forward", draws) == 6
    assert second.count("backward", draws) == 0


def test_dropout_that_would_be_drawn_again_is_refused() -> None:
    """torch's min-cut under a memory budget recomputes dropout with other numbers."""
    model, args = Stack(dropout=0.2), stack()[1]
    with (
        torch._functorch.config.patch(activation_memory_budget=SMALL),
        pytest.raises(FastacError, match=r"min_cut_\w+ runs ops in backward again that draw .*: native_dropout"),
    ):
        Partitioned(model, args, graph.partitioner("attn_only"))


def test_what_is_around_the_partitioned_module_is_left_to_min_cut() -> None:
    model, args = stack()

    class Around(torch.nn.Module):
        def __init__(self, inside: torch.nn.Module) -> None:
            super().__init__()
            self.inside, self.project = inside, torch.nn.Linear(16, 16)

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            video = F.gelu(self.project(video))
            return self.project(F.layer_norm(self.inside(video, text), (16,)))

    torch.manual_seed(0)
    reference = Around(model)
    expected = gradients_of(reference, reference, args)
    once, again = Watched(graph.partitioner("attn_only")), Watched(graph.replaying_partitioner)
    hidden = args[0].clone().requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        inside = Partitioned(model, (hidden, args[1]), once)
    torch.manual_seed(0)
    outer = Around(inside)
    gradients = gradients_of(outer, compiled_again(outer, again), args)
    assert again.split.attention == once.split.attention == (4, 0)
    own = args[0].nbytes * 4  # around it: the input of gelu and its output, the norm's output and its input
    assert once.split.held_bytes < again.split.held_bytes <= once.split.held_bytes + own + 1024
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, expected, strict=True))


def test_a_partitioned_block_may_be_called_twice() -> None:
    block, args = Stack(layers=1), stack()[1]
    once, again = Watched(graph.partitioner("attn_only")), Watched(graph.replaying_partitioner)
    hidden = args[0].clone().requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        partitioned = Partitioned(block, (hidden, args[1]), once)

    def twice(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return partitioned(partitioned(video, text), text.square())

    gradients = gradients_of(block, compiled_again(twice, again), (hidden, args[1]))
    expected = gradients_of(block, lambda video, text: block(block(video, text), text.square()), (hidden, args[1]))
    assert again.split.attention == (4, 0)
    between = args[0].nbytes + args[1].nbytes  # what the second call is given: the same were inputs in the first
    assert again.split.held_bytes == 2 * once.split.held_bytes + between
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, expected, strict=True))


# Passes between the two compiles


def as_early_as_possible(joint: GraphModule) -> None:
    """Put every backward node where its inputs are there: forward and backward nodes stand mixed."""
    order = list(joint.graph.nodes)
    dependent = marks.depends_on_tangents(joint.graph)
    late = [node for node in order if node.op == "call_function" and node not in dependent and not _baked(node)]
    placed = {node for node in order if node.op in ("placeholder", "get_attr")}
    anchor = [node for node in order if node in placed][-1]
    waiting = [node for node in order if node.op == "call_function"]
    while waiting:
        ready = [node for node in waiting if placed.issuperset(node.all_input_nodes)]
        node = next((node for node in ready if node not in late), ready[0])
        anchor.append(node)
        anchor = node
        placed.add(node)
        waiting.remove(node)
    joint.graph.lint()
    joint.recompile()


def _baked(node: Node) -> bool:
    mark = marks.mark_of(node)
    return mark is not None and mark.backward


def eliminate_common_subexpressions(joint: GraphModule) -> None:
    joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()


def both(joint: GraphModule) -> None:
    as_early_as_possible(joint)
    eliminate_common_subexpressions(joint)


@pytest.mark.parametrize("cse", [True, *slow(False)])
@pytest.mark.parametrize("change", [both, *slow(as_early_as_possible, eliminate_common_subexpressions)])
def test_order_and_common_subexpressions_do_not_matter(change: Any, cse: bool) -> None:
    model, args = llama()
    first, second, gradients = round_trip(
        model,
        args,
        graph.partitioner("attn_only"),
        graph.replaying_partitioner,
        budget=SMALL,
        cse=cse,
        before=change,
    )
    assert second.figures == first.figures
    assert same(gradients, gradients_of(model, model, args))


@pytest.mark.slow
def test_mixed_nodes_are_no_longer_in_the_order_of_forward_and_backward() -> None:
    model, args = llama()
    positions: list[bool] = []

    def look(joint: GraphModule) -> None:
        as_early_as_possible(joint)
        dependent = marks.depends_on_tangents(joint.graph)
        positions.extend(node in dependent for node in joint.graph.nodes if node.op == "call_function")

    round_trip(model, args, graph.partitioner("attn_only"), graph.replaying_partitioner, budget=SMALL, before=look)
    assert positions.index(True) < len(positions) - 1 - positions[::-1].index(False)


def test_a_value_whose_mark_is_gone_is_found_by_its_readers() -> None:
    model, args = stack()
    taken = []

    def forget(joint: GraphModule) -> None:
        for node in joint.graph.nodes:
            mark = marks.mark_of(node)
            if mark is not None and mark.saved and not mark.backward:
                del node.meta["custom"]
                taken.append(node)

    first, second, _ = round_trip(
        model, args, graph.partitioner("attn_only"), graph.replaying_partitioner, budget=SMALL, before=forget
    )
    assert len(taken) > 10
    assert second.attention == first.attention
    assert second.held_bytes == first.held_bytes


def test_values_that_are_not_found_are_named() -> None:
    model, args = stack()

    def forget(joint: GraphModule) -> None:
        for node in joint.graph.nodes:
            custom = node.meta.get("custom", {})
            mark = custom.get(marks.FORWARD)
            custom.pop(marks.BACKWARD, None)
            if mark is not None and ("attention" in mark.node or mark.reads):
                custom.pop(marks.FORWARD)

    with pytest.raises(PolicyNotAppliedError, match=r"saved are not found in the joint graph: getitem.*custom"):
        round_trip(model, args, graph.partitioner("attn_only"), graph.replaying_partitioner, before=forget)


def test_a_graph_without_marks_is_refused() -> None:
    model, args = stack()
    with pytest.raises(PolicyNotAppliedError, match="no node of the joint graph carries a mark"):
        round_trip(model, args, min_cut, graph.replaying_partitioner)


def test_a_graph_run_without_its_meta_is_refused() -> None:
    def plain(module: GraphModule, inputs: object) -> Any:
        return make_boxed_func(module.forward)  # the generated code, not the nodes

    model, args = stack()
    once = Partitioned(model, args, graph.partitioner("attn_only"), fw_compiler=plain, bw_compiler=plain)
    with pytest.raises(PolicyNotAppliedError, match="preserve_node_meta"):
        gradients_of(model, compiled_again(once, graph.replaying_partitioner), args)


def test_marks_go_with_any_first_partitioner() -> None:
    model, args = stack()

    def own(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        assert graph.mark_saved(forward, backward, num_fwd_outputs=num_fwd_outputs) > 10
        return forward, backward

    first, second, _ = round_trip(model, args, own, graph.replaying_partitioner, budget=SMALL)
    assert second.figures == first.figures


def test_more_outputs_than_there_are_are_refused() -> None:
    split = GraphModule({}, _three_outputs())
    with pytest.raises(FastacError, match="num_fwd_outputs=5 was given for a forward graph with 3 outputs"):
        graph.mark_saved(split, num_fwd_outputs=5)


def _three_outputs() -> Graph:
    made = Graph()
    x = made.placeholder("x")
    made.output((x, x, x))
    return made


# inductor


@pytest.mark.slow
def test_inductor_decomposes_and_saves_no_more(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, args = Stack(layers=1), stack()[1]
    reference = gradients_of(model, model, args)
    figures = {}
    for second in (graph.replaying_partitioner, None):
        torch._dynamo.reset()
        once, again = Watched(graph.partitioner("attn_only")), Watched(second or min_cut)
        with torch._functorch.config.patch(activation_memory_budget=SMALL):
            partitioned = Partitioned(model, args, once)
        options = {"custom_partitioner_fn": again, "compile_threads": 1, "fx_graph_cache": False}
        with torch._inductor.config.patch(options):
            gradients = gradients_of(model, torch.compile(partitioned, backend="inductor"), args)
        figures[second] = again.split.attention, again.split.held_bytes
        scale = max(gradient.abs().max() for gradient in reference)
        assert all((a - b).abs().max() < 1e-4 * scale for a, b in zip(gradients, reference, strict=True))
        assert again.split.attention == once.split.attention
    assert figures[graph.replaying_partitioner][1] <= once.split.held_bytes < figures[None][1]


def test_inductor_takes_both_partitioners() -> None:
    for made in (graph.partitioner("attn_only"), graph.replaying_partitioner):
        assert isinstance(made, internals.CustomPartitioner)
        assert made.uuid() is None


# The first partitioner


def test_a_partitioner_that_recomputes_attention_is_refused() -> None:
    def careless(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        with torch._functorch.config.patch(activation_memory_budget=0.05):
            return min_cut(joint, inputs, **options)

    model, args = stack()
    with pytest.raises(PolicyNotAppliedError, match="careless runs attention again in backward: _scaled_dot_product"):
        Partitioned(model, args, graph.partitioner("attn_only", then=careless))


def test_attention_in_small_ops_is_refused() -> None:
    class Decomposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return F.scaled_dot_product_attention(x @ self.weight, x, x)

    args = (torch.randn(1, 2, 8, 4),)
    with pytest.raises(PolicyNotAppliedError, match="ran as small ops"):
        Partitioned(Decomposed(), args, graph.partitioner("attn_only"))
    Partitioned(Decomposed(), args, graph.partitioner("full"))


def test_attention_written_out_is_refused_and_a_router_is_none() -> None:
    """Both are a softmax between two products. In a router one of them is with a weight."""

    class Written(torch.nn.Module):
        def __init__(self, router: bool) -> None:
            super().__init__()
            self.router = torch.nn.Parameter(torch.randn(2, 8, 4))
            self.experts = torch.nn.Parameter(torch.randn(2, 4, 8))
            self.is_router = router

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_router:
                return (x @ self.router).softmax(-1) @ self.experts
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x * self.experts.sum()

    args = (torch.randn(2, 16, 8),)
    with pytest.raises(PolicyNotAppliedError, match="softmax attention written out"):
        Partitioned(Written(router=False), args, graph.partitioner("attn_only"))
    Partitioned(Written(router=True), args, graph.partitioner("attn_only"))


def test_recomputed_attention_that_draws_unknown_to_torch_is_refused(rows_as_before: None) -> None:
    library = torch.library.Library("round_trip_test", "FRAGMENT")
    library.define("drawing(Tensor query, Tensor key, Tensor value, float dropout_p) -> Tensor")
    library.impl("drawing", lambda q, k, v, p: q + k + v, "CompositeExplicitAutograd")
    library.impl("drawing", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_autograd(
        "round_trip_test::drawing", lambda context, grad: (grad, grad, grad, None), lib=library
    )
    fastac.register(
        fastac.AttentionOp(
            backend="mine", namespace="round_trip_test", name="drawing", layout="bhsd", dropout="dropout_p"
        )
    )

    class Drawing(torch.nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.weight, self.dropout = torch.nn.Parameter(torch.randn(4, 4)), dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.weight
            return torch.ops.round_trip_test.drawing(x, x, x, self.dropout)

    args = (torch.randn(1, 2, 8, 4),)
    with pytest.raises(FastacError, match=r"lacks torch\.Tag\.nondeterministic_seeded"):
        Partitioned(Drawing(0.1), args, graph.partitioner("full"))
    Partitioned(Drawing(0.0), args, graph.partitioner("full"))
    Partitioned(Drawing(0.1), args, graph.partitioner("attn_only"))


def test_attention_is_tagged_with_what_it_returns() -> None:
    model, args = stack()
    tags = []

    def look(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            if "scaled_dot_product" in node.name and "backward" not in node.name:
                tags.extend(one.meta.get("recompute") for one in (node, *node.users))
        return min_cut(joint, inputs, **options)

    Partitioned(model, args, graph.partitioner("attn_only", then=look))
    assert len(tags) == 12
    assert set(tags) == {CheckpointPolicy.MUST_SAVE}


# What the tests above do not take apart


def test_a_second_partition_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        return min_cut(joint, inputs, **options)

    model, args = stack()
    with torch._functorch.config.patch(activation_memory_budget=SMALL):
        once = Partitioned(model, args, graph.partitioner("attn_only"))
    monkeypatch.setattr(internals, "min_cut", careless)
    with pytest.raises(PolicyNotAppliedError, match=r"differs from the first.*Recomputed then and saved now: \w+"):
        gradients_of(model, compiled_again(once, graph.replaying_partitioner), args)


def test_backward_nodes_keep_their_own_marks() -> None:
    """AOT copies what a forward node carries onto the backward nodes of the same autograd node."""
    model, args = stack()
    seen: list[bool | None] = []

    def look(joint: GraphModule) -> None:
        found = [marks.mark_of(node) for node in joint.graph.nodes if node.meta.get("autograd_backward")]
        seen.extend(None if mark is None else mark.backward for mark in found)

    round_trip(model, args, graph.partitioner("attn_only"), graph.replaying_partitioner, budget=SMALL, before=look)
    assert seen.count(True) > 100
    assert False not in seen


def test_a_forward_mark_on_a_backward_node_does_not_count() -> None:
    made = Graph()
    node = made.call_function(torch.ops.aten.sin.default, (made.placeholder("x"),))
    mark = marks.Mark(0, "sin", "aten.sin.default", False, (), False, 1, (), ("sin",))
    node.meta["custom"] = {marks.FORWARD: mark}
    assert marks.mark_of(node) is mark
    node.meta["autograd_backward"] = True
    assert marks.mark_of(node) is None


def test_equal_nodes_are_those_that_draw_nothing() -> None:
    made = Graph()
    x = made.placeholder("x")
    sines = [made.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2)]
    twice = [made.call_function(torch.ops.aten.mul.Tensor, (sine, 2)) for sine in sines]
    other = made.call_function(torch.ops.aten.mul.Tensor, (sines[0], 3))
    drawn = [made.call_function(torch.ops.aten.native_dropout.default, (x, 0.5, True)) for _ in range(2)]
    equals = round_trip_module._equal_nodes(made)
    assert equals[sines[1]] is sines[0]
    assert equals[twice[1]] is twice[0]
    assert equals[other] is other
    assert equals[drawn[1]] is drawn[1]
