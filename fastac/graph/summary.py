"""What a graph of a training step holds, in one line, for the log and for print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import GraphModule, Node

from fastac.compile.tracing import REGION
from fastac.graph.nodes import RECOMPUTED, is_attention, marks, regions
from fastac.policy import Policy


def attention_calls(graph_module: GraphModule) -> dict[int | None, list[Node]]:
    """Every node that runs an attention forward, also those in the backward, by region; None for outside of any."""
    found: dict[int | None, list[Node]] = {}
    for node in graph_module.graph.nodes:
        if is_attention(node):
            found.setdefault(marks(node).get(REGION), []).append(node)
    return found


def is_recomputing(graph_module: GraphModule) -> bool:
    """Whether some of the graph was copied into its backward."""
    return any(RECOMPUTED in marks(node) for node in graph_module.graph.nodes)


def summary(graph_module: GraphModule, policies: Mapping[int, Policy] | None) -> str:
    """2 regions (attn_only), 4 attention calls, 0 run again, 308 nodes recomputed"""
    calls = [node for nodes in attention_calls(graph_module).values() for node in nodes]
    again = sum(RECOMPUTED in marks(node) for node in calls)
    recomputed = sum(RECOMPUTED in marks(node) for node in graph_module.graph.nodes)
    if policies is None and not recomputed:
        return f"{_count(len(regions(graph_module)), 'region')}, {_count(len(calls), 'attention call')}, no policy"
    number, told = len(regions(graph_module)), ""
    if policies is not None:
        counts = Counter(map(str, policies.values()))
        texts = [*counts] if len(counts) == 1 else [f"{count} {policy}" for policy, count in counts.items()]
        number, told = len(policies), f" ({', '.join(texts)})"
    return (
        f"{_count(number, 'region')}{told}, {_count(len(calls) - again, 'attention call')}, {again} run again, "
        f"{_count(recomputed, 'node')} recomputed"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
