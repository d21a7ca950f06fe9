"""Writes the decisions of a partitioner onto the nodes of its graphs, so that a second trace carries them along.

A mark stands in node.meta["custom"]. make_fx copies it onto every node that it makes while the marked node runs, if an
Interpreter runs the graph under `torch.fx.traceback.preserve_node_meta()`. A node that takes an item out of an op with
several outputs does not call an op, and gets nothing: the mark of the op says which of its outputs are saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fastac.engine import releases
from fastac.graph.nodes import calls, is_getitem, mark, marks, memory_of_value, op_of, outputs_of, value_of
from fastac.graph.torch_private import returns_views

FORWARD_MARK, BACKWARD_MARK = "fastac_forward", "fastac_backward"
"""Keys of the marks. There are two, because AOT copies the marks of a forward node onto the backward nodes of its
gradient (pytorch 164174)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One saved output of a node. It is equal only to itself: two graphs may use the same names."""

    name: str
    item: int | None
    """Which output of the node; None for a node with one output."""
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    """A size that is symbolic is None."""

    def looks_like(self, node: Node) -> bool:
        """Whether a node has a value of this dtype and shape."""
        tensor = value_of(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return False
        return all(ours in (None, theirs) for ours, theirs in zip(self.shape, _sizes(tensor), strict=True))


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a node of a second trace comes from, and the first partitioner's decision about it."""

    target: str
    """The target of the node in the partitioned graph."""
    saved: tuple[Value, ...] = ()
    """Outputs of the node whose memory is held for the backward."""
    returned: bool = False
    """An output of the node is an output of the user's."""
    reads: tuple[Value | None, ...] = ()
    """For each input, the saved value whose memory it has."""
    values: tuple[Value, ...] = dataclasses.field(default=(), repr=False)
    """All values that the graph saves."""

    def __deepcopy__(self, memo: object) -> Mark:
        # AOT copies annotations deeply for every backward node (pytorch 167017). A copy would hold other values.
        return self


def mark_of(node: Node) -> Mark | None:
    """The mark that a node carries."""
    # A mark of the forward on a backward node was copied there by AOT: the node computes a gradient.
    carried = marks(node)
    return carried.get(BACKWARD_MARK) or (None if node.meta.get("autograd_backward") else carried.get(FORWARD_MARK))


def _sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)


def saved_nodes(forward: GraphModule, num_fwd_outputs: int) -> list[Node]:
    """Tensors that a partitioned forward returns for its backward."""
    extra = outputs_of(forward.graph)[num_fwd_outputs:]
    return [node for node in extra if node is not None and isinstance(value_of(node), torch.Tensor)]


def held_bytes(forward: GraphModule, num_fwd_outputs: int) -> int:
    """Bytes that a partitioned forward holds for its backward, beyond its inputs; each storage once.

    Args:
        forward: the forward that a partitioner returned.
        num_fwd_outputs: number of its outputs that are the user's; the others are saved.

    Example:
        >>> forward, backward = partition(joint, inputs, num_fwd_outputs=1)
        >>> fastac.graph.held_bytes(forward, num_fwd_outputs=1)
    """
    inputs = {memory_of_value(node) for node in forward.graph.find_nodes(op="placeholder")}
    saved = [node for node in saved_nodes(forward, num_fwd_outputs) if node.op == "call_function"]
    storages = {memory_of_value(node): node.meta["val"].untyped_storage().nbytes() for node in saved}
    return sum(size for memory, size in storages.items() if memory not in inputs)


def mark_saved(forward: GraphModule, backward: GraphModule | None = None, *, num_fwd_outputs: int) -> int:
    """Mark a partitioned forward, and its backward, so that `replaying_partitioner` can save the same again.

    Args:
        forward: the forward that a partitioner returned.
        backward: its backward; without it, nodes that it recomputes cannot be distinguished from other code.
        num_fwd_outputs: number of outputs of the forward that are the user's; the others are saved.

    Returns:
        The number of values that are marked. Parameters and other inputs are not counted: they need no mark.

    Example:
        >>> forward, backward = my_partitioner(joint, inputs, num_fwd_outputs=1)
        >>> fastac.graph.mark_saved(forward, backward, num_fwd_outputs=1)
    """
    releases.need_traces()
    value_at: dict[Node, Value] = {}
    # For a view, mark the node that made its memory: a second trace makes views anew, without marks.
    for node in map(memory_of, saved_nodes(forward, num_fwd_outputs)):
        if node.op == "call_function":
            item: Any = node.args[1] if is_getitem(node) else None
            value_at[node] = Value(node.name, item, value_of(node).dtype, _sizes(value_of(node)))
    values = tuple(value_at.values())
    returned = {op_of(node) for node in outputs_of(forward.graph)[:num_fwd_outputs] if node is not None}
    for node in calls(forward.graph):
        saved = tuple(value_at[user] for user in (node, *node.users) if user in value_at and op_of(user) is node)
        reads = tuple(value_at.get(memory_of(source)) for source in node.all_input_nodes)
        mark(
            node,
            **{FORWARD_MARK: Mark(str(node.target), saved, node in returned, reads, values), BACKWARD_MARK: None},
        )
    for node in calls(backward.graph) if backward is not None else ():
        mark(node, **{BACKWARD_MARK: Mark(str(node.target), values=values)})
    return len(values)


def find_saved(graph: Graph) -> dict[Value, list[Node] | None]:
    """Value that the first partitioner saved -> nodes of a second trace that hold it; None if there is no such node."""
    marked = [(node, carried) for node in graph.nodes if (carried := mark_of(node)) is not None]
    tuples = {id(carried.values): carried.values for _, carried in marked}
    holders: dict[Value, list[Node] | None] = dict.fromkeys(itertools.chain(*tuples.values()))
    # The nodes of one mark stand together: the second trace made them while the marked node ran.
    for origin, group in itertools.groupby(marked, operator.itemgetter(1)):
        nodes = [node for node, _ in group]
        whole = [node for node in nodes if str(node.target) == origin.target]
        for node in whole:
            for value in origin.saved:
                items = [user for user in node.users if is_getitem(user) and user.args[1] == value.item]
                holders[value] = [*(holders[value] or ()), *([node] if value.item is None else items)]
            # A copy that inductor took out is found by its readers.
            for source, read in zip(node.all_input_nodes, origin.reads, strict=False):
                if read is not None and holders[read] is None:
                    holders[read] = [memory_of(source)]
        # The second trace decomposed the op: only dtype and shape show which of its parts was the output.
        if origin.saved and not whole:
            for value, node in _match(origin.saved, nodes).items():
                holders[value] = [*(holders[value] or ()), node]
    return holders


def memory_of(node: Node) -> Node:
    """The node that made the memory of a view; the node itself if it is not a view."""
    while returns_views(op_of(node)):
        node = op_of(node).all_input_nodes[0]
    return node


def _match(saved: Iterable[Value], parts: list[Node]) -> dict[Value, Node]:
    """Find the saved outputs of an op among the nodes that it was decomposed into, by dtype and shape."""
    parts = [*parts, *(user for node in parts for user in node.users if is_getitem(user))]
    # Outputs are the parts that other nodes read. The last parts are the most likely ones.
    leaving = sorted((node for node in parts if any(user not in parts for user in node.users)), reverse=True)
    holders: dict[Value, Node] = {}
    for value in saved:
        if node := next(filter(value.looks_like, leaving), None):
            holders[value] = node
            leaving.remove(node)
    return holders
