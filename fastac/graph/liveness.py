"""How much memory a graph needs when its nodes run in their order and each result goes after its last use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from fastac.engine.torch_private import has_storage, memory, tree_leaves


def peak_bytes(graph: Graph, counts: Callable[[Node], bool] = lambda node: True) -> int:
    """The most bytes of intermediate results alive at one time, by the traced values; inputs do not count.

    counts: whether the results of a node do.

    Views hold the memory of what they are views of. Scratch memory inside an operator is not known.
    """
    nodes = list(graph.nodes)
    last = {used: place for place, node in enumerate(nodes) for used in node.all_input_nodes}
    spans: dict[int, tuple[int, int, int]] = {}  # memory -> its size, first and last place
    # By the node that made it: a node that was copied has the traced value of the one it repeats.
    makers: dict[Node, dict[object, int | None]] = {}
    for place, node in enumerate(nodes):
        makers[node] = {}
        for value in tree_leaves(node.meta.get("val")):
            if not isinstance(value, torch.Tensor) or not has_storage(value):
                continue
            storage = memory(value)
            viewed = [makers[used][storage] for used in node.all_input_nodes if storage in makers[used]]
            maker = viewed[0] if viewed else len(spans)
            if node.op in ("placeholder", "get_attr"):
                maker = None
            elif not viewed and storage not in makers[node]:
                spans[len(spans)] = value.untyped_storage().nbytes() if counts(node) else 0, place, place
            makers[node].setdefault(storage, maker)
        for maker in makers[node].values():
            if maker is not None:
                size, first, end = spans[maker]
                spans[maker] = size, first, max(end, last.get(node, place))
    changes = [0] * (len(nodes) + 1)
    for size, first, end in spans.values():
        changes[first] += size
        changes[end + 1] -= size
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak
