"""Gathered parameters are never saved, in whatever layout: their whole chain is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fastac import PolicyNotAppliedError, graph
from fastac.graph.gathers import drop_dead_collectives, parameters_of
from tests.graph.partitioned import (
    WORLD,
    Partitioned,
    Split,
    Watched,
    fake_process_group,
    is_gather,
    llama,
    min_cut,
)

FUNCTIONAL = torch.ops._c10d_functional
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with fake_process_group():
        yield


def partitioned(partition: Any, layers: int = 4, columns: bool = False) -> Split:
    model, args = llama(layers, columns)
    watched = Watched(partition)
    Partitioned(model, args, watched)
    return watched.split


def weights(split: Split) -> list[str]:
    """Saved values that are gathered weights in some layout."""
    kinds: dict[Node, set[str]] = {}
    for node in split.forward.graph.nodes:
        kinds[node] = set().union(*(kinds[source] for source in node.all_input_nodes))
        if node.op == "placeholder":
            kinds[node] = {"parameter" if node.meta["desc"].is_param() else "input"}
        elif is_gather(node):
            kinds[node].add("gather")
    return [node.name for node in split.saved if kinds[node] == {"gather", "parameter"}]


def gathers_alone(joint: GraphModule, inputs: Any, **options: Any) -> Any:
    """The guard of before: the all-gather and its wait are recomputed, not what follows."""
    for node in joint.graph.nodes:
        if is_gather(node) or (node.target is FUNCTIONAL.wait_tensor.default and is_gather(node.args[0])):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return min_cut(joint, inputs, **options)


def test_gathered_weights_are_not_saved() -> None:
    guarded = partitioned(graph.partitioner("attn_only"))
    assert weights(guarded) == []
    assert guarded.gathers == (29, 26)  # 7 per block and the last; q, k and v of the first block need no input gradient
    assert guarded.attention == (4, 0)


def test_without_the_guard_all_of_them_are_saved() -> None:
    bare = partitioned(graph.partitioner("attn_only", recompute_gathers=False))
    guarded = partitioned(graph.partitioner("attn_only"))
    assert bare.gathers == (29, 0)
    assert len(weights(bare)) == 26
    gathered = sum(node.meta["val"].untyped_storage().nbytes() for node in bare.saved if node.name in weights(bare))
    assert bare.held_bytes - gathered <= guarded.held_bytes < bare.held_bytes


@pytest.mark.slow
def test_tagging_the_gather_alone_saves_what_follows() -> None:
    """Parameters that are sharded by columns are cut and joined after the gather."""
    partly = partitioned(gathers_alone, columns=True)
    guarded = partitioned(graph.partitioner("attn_only"), columns=True)
    assert len(weights(partly)) == 26
    assert weights(guarded) == []
    assert partly.gathers[0] == guarded.gathers[0] == 29
    assert guarded.gathers[1] == 26
    assert partly.held_bytes > 1.5 * guarded.held_bytes


def test_a_partitioner_that_saves_them_is_refused() -> None:
    def careless(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)
        return min_cut(joint, inputs, **options)

    with pytest.raises(PolicyNotAppliedError, match=r"careless saves gathered parameters: \w+"):
        partitioned(graph.partitioner("attn_only", then=careless), layers=1)


# The chains


def group() -> str:
    return dist.group.WORLD.group_name


def traced(function: Any, *args: torch.Tensor) -> GraphModule:
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*args)


def chain_of(function: Any, *args: torch.Tensor, parameters: int = 1) -> tuple[list[str], GraphModule]:
    """Names of what is tagged when the first arguments are parameters."""
    module = traced(function, *args)
    placeholders = module.graph.find_nodes(op="placeholder")[:parameters]
    chain = graph.recompute_parameter_gathers(module.graph, placeholders)
    tagged = [node for node in module.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]
    assert tagged == chain
    return [node.name for node in chain], module


def gather(tensor: torch.Tensor) -> torch.Tensor:
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(tensor, WORLD, group()))


def test_the_chain_begins_at_the_cast_and_ends_before_the_first_computation() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole = gather(shard[:2].to(torch.bfloat16))
        weight = whole.view(4, 4, 4).permute(1, 0, 2).reshape(16, 4).t().contiguous()
        return x @ weight.float() * 2

    names, _ = chain_of(function, torch.randn(3, 4), torch.randn(2, 4))
    assert names[:4] == ["slice_1", "_to_copy", "all_gather_into_tensor", "wait_tensor"]
    assert {"view", "permute", "t", "clone"} <= {name.partition("_")[0] for name in names}
    assert names[-1] == "_to_copy_1"
    assert not {"mm", "mul"} & set(names)


def test_shards_of_uneven_size_are_padded_split_and_joined_again() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole = gather(torch.nn.functional.pad(shard, (0, 0, 0, 1)))
        return x @ torch.cat([part[:3] for part in whole.split(4)]).t()

    names, module = chain_of(function, torch.randn(3, 4), torch.randn(2, 4))
    assert "constant_pad_nd" in names
    assert "cat" in names
    assert sum("getitem" in name for name in names) == WORLD
    assert [node.name for node in module.graph.nodes if node.op == "call_function" and node.name not in names] == ["mm"]


def test_coalesced_gathers_and_gathers_in_two_steps() -> None:
    def function(one: torch.Tensor, two: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = FUNCTIONAL.all_gather_into_tensor_coalesced([one, two], WORLD, group())
        first, second = (FUNCTIONAL.wait_tensor(part) for part in parts)
        return x @ gather(first.t().contiguous()).t() + second.sum()

    names, _ = chain_of(function, torch.randn(1, 8), torch.randn(1, 8), torch.randn(2, 8), parameters=2)
    assert sum("all_gather" in name for name in names) == 2
    assert sum("getitem" in name for name in names) == 2
    assert sum("wait" in name for name in names) == 3
    assert "sum_1" not in names


def test_activations_are_left_to_the_policy() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole = gather(shard)
        activations = gather(x)
        scaled = gather(shard * 2)
        return activations @ whole + gather(x @ whole).sum() + scaled.sum() + shard.t().sum()

    names, module = chain_of(function, torch.randn(1, 8), torch.randn(1, 8))
    assert names == ["all_gather_into_tensor", "wait_tensor"]
    assert sum(is_gather(node) for node in module.graph.nodes) == 4


def test_regions_of_checkpointing_do_not_count_for_a_chain() -> None:
    """torch saves what one region makes and the next reads: gathers that are fetched ahead."""
    module = traced(lambda shard, x: x @ gather(shard).t(), torch.randn(1, 8), torch.randn(2, 8))
    for number, node in enumerate(module.graph.nodes):
        node.meta["ac_graph_id"] = number
    graph.recompute_parameter_gathers(module.graph, module.graph.find_nodes(op="placeholder")[:1])
    left = [node.name for node in module.graph.nodes if "ac_graph_id" in node.meta and node.op == "call_function"]
    assert left == ["mm"]


# Which inputs are parameters


class _Description:
    def __init__(self, parameter: bool) -> None:
        self.parameter = parameter

    def is_param(self) -> bool:
        return self.parameter


def test_parameters_are_those_that_aot_describes_or_that_stay_in_place() -> None:
    made = Graph()
    nodes: list[Node] = [made.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1", "primals_3")]
    nodes[0].meta["desc"] = _Description(True)
    nodes[1].meta["desc"] = _Description(False)
    assert parameters_of(made) == [nodes[0]]
    assert parameters_of(made, [2]) == [nodes[0], nodes[3]]  # static inputs are counted without tangents


def test_compiled_parameters_are_known(eight_ranks: None) -> None:
    """torch.compile describes its inputs in another way than AOT's own export."""
    from tests.graph.partitioned import compiled_again

    model, args = llama(1)
    watched = Watched(graph.partitioner("attn_only"))
    compiled_again(model, watched)(*args).float().sum().backward()
    assert weights(watched.split) == []
    assert watched.split.gathers == (8, 5)


# Collectives without a reader


def test_a_collective_nobody_reads_is_dropped_and_no_other_op() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gather(shard.to(torch.bfloat16))
        x.add_(1)
        return gather(x)

    module = traced(function, torch.randn(1, 8), torch.randn(1, 8))
    module.graph.eliminate_dead_code()
    assert sum(is_gather(node) for node in module.graph.nodes) == 2
    drop_dead_collectives(module)
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["add_", "all_gather_into_tensor_1", "wait_tensor_1"]
