"""A partitioner for the second compile of a graph that was partitioned before.

Where a partitioned forward and backward are compiled again, inside a larger joint graph, their recompute stands in that
graph as plain nodes, and min-cut would decide anew: attention runs again, or other tensors are saved.
`replaying_partitioner` reads the marks of the first partitioner and saves the same again.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.errors import CompiledPolicyNotAppliedError
from fastac.graph import internals
from fastac.graph.marks import (
    depends_on_tangents,
    find_saved,
    held_bytes,
    is_alias,
    mark_of,
    memory_of,
    outputs_of,
    saved_nodes,
)
from fastac.graph.partitioning import Graphs, draws, partition, tag_gathers

logger = logging.getLogger("fastac")


class _ReplayingPartitioner(internals.CustomPartitioner):  # type: ignore[misc]
    def __call__(
        self,
        joint: GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **options: Any,
    ) -> Graphs:
        found = find_saved(joint.graph)
        if not found.wanted:
            raise CompiledPolicyNotAppliedError(
                "replaying_partitioner: no node of the joint graph carries a mark, so nothing is known about what the "
                "first partitioner saved. Partition first with fastac.graph.partitioner(...) or fastac.graph."
                "mark_saved(...), and run both graphs by torch.fx.Interpreter under torch.fx.traceback."
                "preserve_node_meta(), as aot_compile_joint_with_descriptors does unless it is given a compiler."
            )
        if lost := found.lost():
            raise CompiledPolicyNotAppliedError(
                f"replaying_partitioner: {len(lost)} of {sum(map(len, found.wanted.values()))} values that the first "
                f"partitioner saved are not found in the joint graph: {', '.join(lost)}. A pass between the two "
                f"compiles replaced their nodes without copying node.meta['custom']. Run it later, or let it copy that."
            )
        gathers = {node for node in tag_gathers(joint.graph, static_lifetime_input_indices) if mark_of(node) is None}
        needed, recomputed = _tag_replay(joint.graph, num_fwd_outputs, found.saved - gathers)
        kept, dropped = ({memory_of(n) for n in nodes} for nodes in (needed, (*recomputed, *gathers)))
        memory = {node.name: memory_of(node) for node in joint.graph.nodes}
        same = _give_tags_to_equals(joint.graph, needed, recomputed)
        forward, backward = partition(
            internals.min_cut,
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            **options,
        )
        saves = {same[memory[node.name].name] for node in saved_nodes(forward, num_fwd_outputs)}
        kept_names = {same[node.name] for node in kept if node.op == "call_function"}
        missing = sorted(kept_names - saves)
        extra = sorted({same[node.name] for node in dropped if node.op == "call_function"} & saves - kept_names)
        if missing or extra:
            raise CompiledPolicyNotAppliedError(
                f"replaying_partitioner: the second partition differs from the first. Saved then and not now: "
                f"{', '.join(missing) or 'none'}. Recomputed then and saved now: {', '.join(extra) or 'none'}."
            )
        logger.info(
            "replaying_partitioner: %d values of %d partitioned graphs are saved again, %d bytes held in all",
            len(kept),
            len(found.wanted),
            held_bytes(forward, num_fwd_outputs),
        )
        return forward, backward

    def uuid(self) -> None:
        """None: inductor must not take from its cache what another partitioner made."""


replaying_partitioner = _ReplayingPartitioner()
"""Saves in a joint graph exactly what was saved in the marked graphs that were traced into it.

Serves as AOT's `partition_fn` and as inductor's `custom_partitioner_fn`. What comes from no marked graph is for torch's
min-cut to decide. Raises PolicyNotAppliedError, with their names, when saved values are not found again.
"""


def _tag_replay(graph: Graph, num_fwd_outputs: int, saved: set[Node]) -> tuple[set[Node], set[Node]]:
    """Tag what the marked graphs save and recompute; returns what of both the backward needs.

    Only what is needed is tagged: torch keeps the inputs of every node that it must recompute.
    """
    dependent = depends_on_tangents(graph)
    for node in graph.nodes:
        if mark_of(node) is not None:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)
    needed: set[Node] = set()
    recomputed: set[Node] = set()
    pending = [node for user in dependent for node in user.all_input_nodes]
    pending += [node for node in outputs_of(graph)[num_fwd_outputs:] if node is not None]
    seen = set(dependent)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in saved:
            needed.add(node)
        elif node.op == "call_function" and _is_recomputed(node):
            recomputed.add(node)
            pending.extend(node.all_input_nodes)
    needed = {node for node in needed if not (node.target is operator.getitem and node.args[0] in recomputed)}
    for node in recomputed:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in needed:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        memory = memory_of(node)  # torch takes no ban for a view
        if memory.op == "call_function":
            memory.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if memory.target is operator.getitem:
            memory.all_input_nodes[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return needed, recomputed


def _is_recomputed(node: Node) -> bool:
    """Whether a node that is not saved comes from a marked graph, so that the backward computes it anew."""
    if node.target is operator.getitem and mark_of(node) is None:
        return _is_recomputed(node.all_input_nodes[0])
    mark = mark_of(node)
    if mark is None:
        return is_alias(node)
    return not mark.returned and not draws(node)


def _give_tags_to_equals(graph: Graph, needed: set[Node], recomputed: set[Node]) -> dict[str, str]:
    """Tag nodes of equal value alike, since of these common subexpression elimination leaves one, whichever it likes.

    Returns the name of the first of its equals for every node.
    """
    first: dict[Node, str] = {}
    equals: dict[object, list[Node]] = {}
    for node in graph.nodes:
        key: object = node
        if node.op == "call_function" and not draws(node):
            key = (node.target, *(str(map_arg(part, lambda n: first[n])) for part in (node.args, node.kwargs)))
        equals.setdefault(key, []).append(node)
        first[node] = equals[key][0].name
    for group in equals.values():
        for tagged in (recomputed, needed):  # what is saved for one needs no recompute for another
            if one := next((node for node in group if node in tagged), None):
                for node in group:
                    node.meta["recompute"] = one.meta["recompute"]
    return {node.name: name for node, name in first.items()}
