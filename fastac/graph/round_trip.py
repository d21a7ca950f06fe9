"""A partitioner for the second compile of a graph that was partitioned before.

If a partitioned forward and backward are compiled again, inside a larger joint graph, their recompute stands in that
graph as plain nodes. Min-cut would decide anew: attention would run again, or other tensors would be saved.
`replaying_partitioner` reads the marks of the first partitioner and saves the same values again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.errors import CompiledPolicyNotAppliedError
from fastac.graph import torch_private
from fastac.graph.nodes import TAG, calls, depends_on_tangents, draws, op_of, outputs_of, untag
from fastac.graph.partitioning import Graphs, parameters_of, partition, recompute_parameter_gathers
from fastac.graph.saved_values import find_saved, mark_of, memory_of, saved_nodes


class _ReplayingPartitioner(torch_private.Partitioner):
    def __call__(
        self, joint: GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
    ) -> Graphs:
        if not any(map(mark_of, joint.graph.nodes)):
            raise CompiledPolicyNotAppliedError(
                "replaying_partitioner: no node of the joint graph carries a mark, so the values that the first "
                "partitioner saved are not known. Partition first with fastac.graph.partitioner(...) or fastac.graph."
                "mark_saved(...), and run both graphs by torch.fx.Interpreter under torch.fx.traceback."
                "preserve_node_meta(), as aot_compile_joint_with_descriptors does unless it is given a compiler."
            )
        holders = find_saved(joint.graph)
        if lost := [value.name for value, nodes in holders.items() if nodes is None]:
            raise CompiledPolicyNotAppliedError(
                f"replaying_partitioner: {len(lost)} of {len(holders)} values that the first "
                f"partitioner saved are not found in the joint graph: {', '.join(lost)}. A pass between the two "
                f"compiles replaced their nodes without copying node.meta['custom']. Run it later, or let it copy that."
            )
        # Gathers outside of the marked graphs have no marks, and are recomputed as well.
        recompute_parameter_gathers(
            joint.graph, parameters_of(joint.graph, options.get("static_lifetime_input_indices"))
        )
        equals = _equal_nodes(joint.graph)
        saved = {node for nodes in holders.values() for node in nodes or ()}
        to_save, to_recompute = _tag_replay(joint.graph, num_fwd_outputs, saved, equals)
        # min-cut may save a view, or an equal node, in the place of a tagged one: compare the memory, not the names.
        memory = {node.name: equals[memory_of(node)] for node in joint.graph.nodes}
        forward, backward = partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        saves = {memory[node.name] for node in saved_nodes(forward, num_fwd_outputs) if node.name in memory}
        computed = {memory[node.name] for node in calls(backward.graph) if node.name in memory}
        missing = sorted(node.name for node in (to_save & computed) - saves)
        extra = sorted(node.name for node in to_recompute & saves)
        if missing or extra:
            raise CompiledPolicyNotAppliedError(
                f"replaying_partitioner: the second partition differs from the first. Saved then and not now: "
                f"{', '.join(missing) or 'none'}. Recomputed then and saved now: {', '.join(extra) or 'none'}."
            )
        return forward, backward


replaying_partitioner = _ReplayingPartitioner()
"""A partitioner that saves in a joint graph exactly what was saved in the marked graphs that were traced into it.

Use it as AOT's `partition_fn` and as inductor's `custom_partitioner_fn`. torch's min-cut decides about nodes that come
from no marked graph. Raises PolicyNotAppliedError, with their names, when saved values are not found again.

Example:
    >>> options = {"custom_partitioner_fn": fastac.graph.replaying_partitioner}
    >>> compiled = torch.compile(partitioned_module, options=options)
"""


def _tag_replay(
    graph: Graph, num_fwd_outputs: int, saved: set[Node], equals: dict[Node, Node]
) -> tuple[set[Node], set[Node]]:
    """Tag the nodes that the marked graphs save and recompute, and that the backward needs. Returns both.

    Other nodes are not tagged: torch saves the inputs of every node that it must recompute. Of equal nodes the first
    is returned. A view counts as the node that made its memory: autograd saves views of the memory it saves.
    """
    dependent = depends_on_tangents(graph)
    saved_values = {equals[node] for node in saved - dependent}
    needed: set[Node] = set()
    recomputed: set[Node] = set()
    # Walk backwards from what the backward reads. A saved value ends the walk: nothing before it runs again.
    pending = [node for user in dependent for node in user.all_input_nodes]
    pending += [node for node in outputs_of(graph)[num_fwd_outputs:] if node is not None]
    seen = set(dependent)
    while pending:
        node = memory_of(pending.pop())
        if node in seen:
            continue
        seen.add(node)
        if equals[node] in saved_values:
            needed.add(equals[node])
        elif (mark := mark_of(op_of(node))) is not None and not mark.returned and not draws(node):
            recomputed.add(equals[node])
            pending.extend(node.all_input_nodes)
    needed = {node for node in needed if equals[op_of(node)] not in recomputed}
    # Equal nodes are tagged alike: common subexpression elimination of the partitioner leaves any of them.
    for node in graph.nodes:
        memory = memory_of(node)
        if mark_of(memory) is not None:
            untag(node)
        if node.op != "call_function" or node in dependent:
            continue
        if equals[memory] in recomputed:
            node.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        elif equals[memory] in needed and memory is node:
            node.meta[TAG] = op_of(node).meta[TAG] = CheckpointPolicy.MUST_SAVE
    return needed, recomputed


def _equal_nodes(graph: Graph) -> dict[Node, Node]:
    """Node -> the first node of equal value, as common subexpression elimination sees them."""
    equals: dict[Node, Node] = {}
    first_of: dict[object, Node] = {}
    for node in graph.nodes:
        key: object = node
        if node.op == "call_function" and not draws(node):
            key = node.target, str(map_arg((node.args, node.kwargs), equals.__getitem__))
        equals[node] = first_of.setdefault(key, node)
    return equals
