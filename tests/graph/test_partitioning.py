"""fastac.graph.partitioner: attention is saved as the policy says, gathered parameters never, in whatever layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fastac import FastacError, PolicyNotAppliedError, graph
from fastac.graph.nodes import drop_unused
from tests.graph.partitioned import (
    WORLD,
    Partitioned,
    Split,
    Watched,
    compiled_again,
    is_gather,
    sharded_stack,
    small_stack,
)
from tests.graph.partitioned import eight_ranks as eight_ranks
from tests.support import written_out

pytestmark = pytest.mark.usefixtures("eight_ranks")

FUNCTIONAL = torch.ops._c10d_functional


# Attention


@pytest.mark.parametrize(
    ("options", "budget", "kind", "error"),
    [
        ({}, 0.0, PolicyNotAppliedError, "runs attention again in backward: _scaled_dot_product"),
        ({"dropout": 0.2}, 0.3, FastacError, r"runs ops in backward again that draw .*: native_dropout"),
        ({"attend": written_out}, 1.0, PolicyNotAppliedError, "small ops"),
    ],
    ids=["attention that runs again", "dropout that would be drawn again", "attention that cannot be saved"],
)
def test_what_is_refused(options: dict[str, Any], budget: float, kind: Any, error: str) -> None:
    """Without a budget torch's min-cut saves nothing, whatever the tags say. With one it draws other numbers again."""
    with torch._functorch.config.patch(activation_memory_budget=budget), pytest.raises(kind, match=error):
        Partitioned(*small_stack(**options), graph.partitioner("attn_only"))
    if "attend" in options:
        Partitioned(*small_stack(**options), graph.partitioner("full"))


def test_a_joint_graph_has_no_blocks() -> None:
    with pytest.raises(FastacError, match="dict"):
        graph.partitioner({"blocks.0": "full", "*": "attn_only"})  # type: ignore[arg-type]


# Gathered parameters


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


def test_gathered_weights_are_not_saved() -> None:
    """Neither by AOT's own export nor by torch.compile, which describes its inputs in another way."""
    splits = {}
    for guarded in (True, False):
        watched = Watched(graph.partitioner("attn_only", recompute_gathers=guarded))
        Partitioned(*sharded_stack(), watched)
        splits[guarded] = watched.split
    # 7 in the block; that of kv, whose input needs no gradient, is not gathered again.
    assert (splits[True].gathers, splits[True].attention, weights(splits[True])) == ((7, 6), (2, 0), [])
    assert (splits[False].gathers, len(weights(splits[False]))) == ((7, 0), 6)
    model, args = sharded_stack()
    watched = Watched(graph.partitioner("attn_only"))
    compiled_again(model, watched)(*args).float().sum().backward()
    assert (watched.split.gathers, weights(watched.split)) == ((7, 6), [])


def traced(function: Any, *args: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def chain_of(function: Any, *args: torch.Tensor, parameters: int = 1) -> tuple[list[str], list[str]]:
    """Names of what is tagged when the first arguments are parameters, and of the rest."""
    module = traced(function, *args)
    for number, node in enumerate(module.graph.nodes):
        node.meta["ac_graph_id"] = number  # torch saves what one region makes and the next reads
    chain = graph.recompute_parameter_gathers(module.graph, module.graph.find_nodes(op="placeholder")[:parameters])
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert chain == [node for node in calls if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]
    assert chain == [node for node in calls if "ac_graph_id" not in node.meta]
    return [node.name for node in chain], [node.name for node in calls if node not in chain]


def gather(tensor: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(tensor, WORLD, group))


def test_the_chain_begins_at_the_cast_and_ends_before_the_first_computation() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole = gather(shard[:2].to(torch.bfloat16))
        return x @ whole.view(4, 4, 4).permute(1, 0, 2).reshape(16, 4).t().contiguous().float() * 2

    names, rest = chain_of(function, torch.randn(3, 4), torch.randn(2, 4))
    assert names[:4] == ["slice_1", "_to_copy", "all_gather_into_tensor", "wait_tensor"]
    assert names[-1] == "_to_copy_1"
    assert rest == ["mm", "mul"]


def test_coalesced_gathers_and_gathers_in_two_steps() -> None:
    def function(one: torch.Tensor, two: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD.group_name
        parts = FUNCTIONAL.all_gather_into_tensor_coalesced([one, two], WORLD, group)
        first, second = (FUNCTIONAL.wait_tensor(part) for part in parts)
        return x @ gather(first.t().contiguous()).t() + second.sum()

    names, rest = chain_of(function, torch.randn(1, 8), torch.randn(1, 8), torch.randn(2, 8), parameters=2)
    assert [sum(part in name for name in names) for part in ("all_gather", "getitem", "wait")] == [2, 2, 3]
    assert rest == ["mm", "sum_1", "add"]


def test_activations_are_left_to_the_policy() -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        whole = gather(shard)
        return gather(x) @ whole + gather(x @ whole).sum() + gather(shard * 2).sum() + shard.t().sum()

    names, _ = chain_of(function, torch.randn(1, 8), torch.randn(1, 8))
    assert names == ["all_gather_into_tensor", "wait_tensor"]


def test_a_collective_without_a_reader_is_dropped_and_no_other_op() -> None:
    """For torch a wait is never dead."""

    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gather(shard.to(torch.bfloat16))
        x.add_(1)
        return gather(x)

    module = traced(function, torch.randn(1, 8), torch.randn(1, 8))
    drop_unused(module)
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["add_", "all_gather_into_tensor_1", "wait_tensor_1"]
