"""rematerialize: nodes tagged for recomputation run again in the backward, right before they are first needed there.

torch has such a pass. This one also takes steps with several backwards (two losses, two micro-batches), which torch's
refuses, and it does not depend on a private module.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, GraphModule, Node

from fastac.errors import FastacError
from fastac.graph.internals import BACKWARD, COLLECTIVES, is_functional
from fastac.graph.nodes import RECOMPUTED, REGION_TAG, TAG, draws, is_backward, is_recomputed, mark


def rematerialize(graph_module: GraphModule) -> GraphModule:
    """The graph with what is tagged for recomputation copied into each backward, and gone from where nobody needs it.

    The graph must be functional. Raises FastacError for a node that is to run again and writes or draws random numbers.
    """
    for node in graph_module.graph.nodes:
        if is_recomputed(node) and (draws(node) or not is_functional(node)):
            what = "draws random numbers" if is_functional(node) else "writes its argument"
            raise FastacError(
                f"rematerialize: {node.target} is tagged for recomputation and {what}, so that it would not repeat "
                f"itself. Tag it as saved; fastac.graph.tag does."
            )
    order = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    graph = Graph()
    copied: dict[Node, Node] = {}
    again: dict[Node, Node] = {}  # recomputed in this backward
    times: Counter[Node] = Counter()
    in_backward = False

    def recompute(node: Node) -> None:
        copy = graph.node_copy(node, lambda used: again.get(used, copied[used]))
        mark(copy, **BACKWARD, **{RECOMPUTED: node.name})
        copy.name = f"{node.name}_recomputed" + (f"_{times[node]}" if times[node] else "")
        times[node] += 1
        again[node] = copy

    for node in graph_module.graph.nodes:
        if is_backward(node):
            if not in_backward:
                again.clear()
            in_backward = True
            for needed in sorted(_needed(node, again), key=order.__getitem__):
                recompute(needed)
            copied[node] = graph.node_copy(node, lambda used: again.get(used, copied[used]))
        else:
            in_backward = False
            copied[node] = graph.node_copy(node, copied.__getitem__)
    for node in graph.nodes:  # done: torch's own passes, which read the tags, would do it again
        for name in (TAG, REGION_TAG):
            node.meta.pop(name, None)
    after = GraphModule(graph_module, graph)
    after.graph.eliminate_dead_code(is_impure_node=lambda node: _is_kept(after, node))
    after.graph.lint()
    after.recompile()
    return after


def _needed(node: Node, again: dict[Node, Node]) -> set[Node]:
    """What must be recomputed, and is not yet, for the inputs of a node of the backward."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if is_recomputed(one) and one not in found and one not in again:
            found.add(one)
            waiting.extend(one.all_input_nodes)
    return found


def _is_kept(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node stays without users: inputs, outputs, writes, and draws, which move the generator for the next."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    return draws(node) or not is_functional(node) or (node.is_impure() and not _is_collective(node))


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") in (COLLECTIVES, f"{COLLECTIVES}_autograd")
