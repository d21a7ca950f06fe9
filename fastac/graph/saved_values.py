"""What a partitioner decided, written onto the nodes of its graphs so that a second trace carries it along.

A mark stands in node.meta["custom"], which make_fx copies onto every node that it makes while the node runs, provided
the graph is run by an Interpreter under `torch.fx.traceback.preserve_node_meta()`. The nodes that take an item out of
an op with several outputs are no op calls and carry nothing, so the op itself says which of its outputs are saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from fastac.engine import releases
from fastac.graph.nodes import is_getitem, marks, memory_of_value, outputs_of
from fastac.graph.torch_private import schema_of

FORWARD, BACKWARD = "fastac_forward", "fastac_backward"
"""Keys of the marks. Two, because AOT copies what a forward node carries onto the backward nodes of its gradient."""

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Value:
    """One saved output of a node. item: which one, None for a node with one output; shape: None where symbolic."""

    name: str
    item: int | None
    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def looks_like(self, node: Node) -> bool:
        """Whether a node has a value of this dtype and shape."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return False
        return all(ours in (None, theirs) for ours, theirs in zip(self.shape, _sizes(tensor), strict=True))


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a node of a second trace comes from, and what the first partitioner decided about it.

    graph: number of the partitioned graph; target: of the node there. saved: its outputs whose memory is held for the
    backward. returned: an output of it is the user's. reads: the name of the saved value that each input looks at, or
    None. names: of all values that graph saves.
    """

    graph: int
    target: str
    saved: tuple[Value, ...] = ()
    returned: bool = False
    reads: tuple[str | None, ...] = ()
    names: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __deepcopy__(self, memo: object) -> Mark:
        return self  # AOT copies it deeply for every backward node


def mark_of(node: Node) -> Mark | None:
    """The mark that a node carries."""
    custom = node.meta.get("custom")
    if not isinstance(custom, dict):
        return None
    return custom.get(BACKWARD) or (None if node.meta.get("autograd_backward") else custom.get(FORWARD))


def _sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)


def saved_nodes(forward: GraphModule, num_fwd_outputs: int) -> list[Node]:
    """Tensors that a partitioned forward returns for its backward."""
    extra = outputs_of(forward.graph)[num_fwd_outputs:]
    return [node for node in extra if node is not None and isinstance(node.meta.get("val"), torch.Tensor)]


def held_bytes(forward: GraphModule, num_fwd_outputs: int) -> int:
    """Bytes that a partitioned forward keeps for its backward, beyond its inputs; each storage once.

    Args:
        forward: what a partitioner returned for the forward.
        num_fwd_outputs: how many of its outputs are the user's; the others are saved.

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
        forward: what a partitioner returned for the forward.
        backward: and for the backward; without it, what it recomputes cannot be distinguished from other code.
        num_fwd_outputs: how many outputs of the forward are the user's; the others are saved.

    Returns:
        How many values are marked. Parameters and other inputs are not counted: they need no mark.

    Example:
        >>> forward, backward = my_partitioner(joint, inputs, num_fwd_outputs=1)
        >>> fastac.graph.mark_saved(forward, backward, num_fwd_outputs=1)
    """
    releases.need_traces()
    outputs = outputs_of(forward.graph)
    graph = next(_numbers)
    values: dict[Node, list[Value]] = {}
    # Of a view the node that made its memory: a second trace makes views anew, without marks.
    for node in dict.fromkeys(map(memory_of, saved_nodes(forward, num_fwd_outputs))):
        if node.op == "call_function":
            producer, item = _producer(node)
            tensor = node.meta["val"]
            values.setdefault(producer, []).append(Value(node.name, item, tensor.dtype, _sizes(tensor)))
    names = tuple(value.name for found in values.values() for value in found)
    returned = {_producer(node)[0] for node in outputs[:num_fwd_outputs] if node is not None}
    for node in forward.graph.nodes:
        if node.op == "call_function":
            sources = [memory_of(source).name for source in node.all_input_nodes]
            reads = tuple(name if name in names else None for name in sources)
            _write(
                node,
                FORWARD,
                Mark(graph, str(node.target), tuple(values.get(node, ())), node in returned, reads, names),
            )
    for node in backward.graph.nodes if backward is not None else ():
        if node.op == "call_function":
            _write(node, BACKWARD, Mark(graph, str(node.target), names=names))
    return len(names)


def _write(node: Node, key: str, mark: Mark) -> None:
    others = {name: value for name, value in marks(node).items() if name not in (FORWARD, BACKWARD)}
    node.meta["custom"] = {**others, key: mark}


def _producer(node: Node) -> tuple[Node, int | None]:
    if is_getitem(node) and isinstance(node.args[0], Node):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, None


@dataclasses.dataclass
class Found:
    """What the marks of a graph say. saved: nodes to save; names: which values they are, by graph; wanted: all."""

    saved: set[Node] = dataclasses.field(default_factory=set)
    names: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    wanted: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def add(self, graph: int, name: str, nodes: Iterable[Node]) -> None:
        """Nodes hold a saved value; none where nobody reads it any more."""
        self.names.setdefault(graph, set()).add(name)
        self.saved.update(nodes)

    def lost(self) -> list[str]:
        """Names of saved values that no node is known to hold."""
        return [name for graph, names in self.wanted.items() for name in names if name not in self.names.get(graph, ())]


def find_saved(graph: Graph) -> Found:
    """Which nodes of a second trace hold what the first partitioner saved."""
    found = Found()
    parts: list[Node] = []  # of one marked op that was decomposed
    for node in (*graph.nodes, None):
        mark = mark_of(node) if node is not None else None
        if node is not None and mark is None:
            continue
        if parts and mark != mark_of(parts[0]):
            _match(parts, found)
            parts = []
        if node is None or mark is None:
            continue
        found.wanted[mark.graph] = mark.names
        if str(node.target) != mark.target:
            parts += [node] if mark.saved else []
            continue
        for value in mark.saved:
            items = [user for user in node.users if is_getitem(user) and user.args[1] == value.item]
            found.add(mark.graph, value.name, [node] if value.item is None else items)
        # A copy that inductor took out is what its readers read.
        for source, name in zip(node.all_input_nodes, mark.reads, strict=False):
            if name is not None and name not in found.names.get(mark.graph, ()):
                found.add(mark.graph, name, [memory_of(source)])
    return found


def memory_of(node: Node) -> Node:
    """The node that made the memory a view looks at; the node itself for one that is no view."""
    while node.op == "call_function":
        source = node.all_input_nodes[0] if is_getitem(node) else node
        schema = schema_of(source)
        if schema is None or schema.is_mutable or all(returned.alias_info is None for returned in schema.returns):
            return node
        node = source.all_input_nodes[0]
    return node


def _match(parts: list[Node], found: Found) -> None:
    """Find the saved outputs of an op among the nodes that it was decomposed into, by dtype and shape."""
    parts += [user for node in parts for user in node.users if is_getitem(user)]
    order = {node: place for place, node in enumerate(parts[0].graph.nodes)}
    leaving = [node for node in parts if any(user not in parts for user in node.users)]
    leaving.sort(key=order.__getitem__, reverse=True)
    mark = mark_of(parts[0])
    for value in mark.saved if mark is not None else ():
        if node := next(filter(value.looks_like, leaving), None):
            found.add(mark.graph, value.name, [node])  # type: ignore[union-attr]
            leaving.remove(node)
