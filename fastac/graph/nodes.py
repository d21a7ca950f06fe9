"""Reads a node of a traced graph: forward or backward, its region, what it computes, its tags."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fastac.compiled.tracing import REGION, Decisions
from fastac.engine import torch_private
from fastac.graph.torch_private import BACKWARD_PHASE, COLLECTIVES, is_drawing, is_functional, is_tangent
from fastac.policy import Policy
from fastac.registry import classify

STATE = "fastac_state"
"""Mark of an input that belongs to the model: its name."""

REPEATS = "fastac_repeats"
"""Mark of a node that was copied into the backward: the name of the node it repeats."""

# A private name, but the interface between torch's checkpointing and its partitioners since pytorch 103357.
TAG = "recompute"
"""Key of `node.meta` in which torch's partitioners look for the decision about a node."""

REGION_TAG = "ac_graph_id"
"""Key of `node.meta` in which torch's partitioners look for the region of a node."""


def marks(node: Node) -> dict[str, Any]:
    """The annotations that were current while the node was traced."""
    return node.meta.get("custom") or {}


def mark(node: Node, **new: Any) -> None:
    """Add marks to a node; other nodes that share the dict keep theirs."""
    node.meta["custom"] = {**marks(node), **new}


def calls(graph: Graph) -> list[Node]:
    """The nodes that call a function, in order; the others are inputs, outputs and constants."""
    return [node for node in graph.nodes if node.op == "call_function"]


def is_getitem(node: Node) -> bool:
    """Whether a node takes one of several outputs of another."""
    return node.op == "call_function" and node.target is operator.getitem


def op_of(node: Node) -> Node:
    """The op whose output a getitem takes; any other node itself. Marks are read there: a getitem may lack them."""
    while is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def is_backward(node: Node) -> bool:
    """Whether autograd's engine ran the node. torch's own tracers note it under another key than annotations."""
    node = op_of(node)
    return marks(node).get("phase") == BACKWARD_PHASE["phase"] or bool(node.meta.get("autograd_backward"))


def is_attention(node: Node) -> bool:
    """Whether a node runs an attention forward, by the rows of the registry."""
    bound = classify(node.target)
    return bound is not None and bound.is_attention


def regions(graph_module: GraphModule) -> dict[int, list[Node]]:
    """Region -> its nodes in the forward, in order."""
    # Backward nodes are left out: AOT copies the annotations of the forward onto them (pytorch 164174).
    nodes_of: dict[int, list[Node]] = {}
    for node in graph_module.graph.nodes:
        number = marks(op_of(node)).get(REGION)
        if number is not None and node.op == "call_function" and not is_backward(node):
            nodes_of.setdefault(number, []).append(node)
    return nodes_of


def decisions_about(
    graph_module: GraphModule, nodes: Iterable[Node], policy: Policy, where: str = ""
) -> dict[Node, bool]:
    """Nodes that a policy decides about -> whether it saves them. where: the block, for errors.

    Raises for attention that cannot be saved: see `tag`.
    """
    decisions = Decisions(policy)
    decided = {}
    for node in nodes:
        decision = decisions.of(node.target, *arguments_of(graph_module, node), value_of(node))
        if decision is not None:
            decided[node] = decision
    decisions.check(where)
    return decided


def untag(node: Node) -> None:
    """Remove a node's tag, and the region it belongs to."""
    for name in (TAG, REGION_TAG):
        node.meta.pop(name, None)


def value_of(node: Node) -> Any:
    """The value of a node in the trace: fake tensors, numbers."""
    return node.meta.get("val")


def arguments_of(graph_module: GraphModule, node: Node) -> tuple[Any, Any]:
    """The arguments of a node, by position and by name, with traced values in the place of nodes."""

    def value(source: Node) -> Any:
        traced = value_of(source)
        if source.op == "get_attr" and traced is None:
            return getattr(graph_module, str(source.target), None)
        if STATE in marks(source) and isinstance(traced, torch.Tensor) and traced.is_floating_point():
            return torch.nn.Parameter(traced)  # so that a product with a weight is not taken for attention
        return traced

    return map_arg(node.args, value), map_arg(node.kwargs, value)


def memory_of_value(node: Node) -> object:
    """A key for the storage of a node's traced value, which views share; None for a value that is not a tensor."""
    value = value_of(node)
    return torch_private.memory(value) if isinstance(value, torch.Tensor) else None


def draws(node: Node) -> bool:
    """Whether a node draws random numbers. torch's tag says so of all attention; here its row decides."""
    # pytorch issue 187985. Since 2.15 torch's partitioners look at the argument themselves if it is called dropout_p.
    bound = classify(node.target)
    if bound is not None and bound.is_attention:
        return bound.draws(map_arg(node.args, value_of), map_arg(node.kwargs, value_of))
    return is_drawing(node)


def stays(node: Node) -> bool:
    """Whether a node without users stays in its graph: inputs, outputs, writes, and draws, which move the generator.

    Collectives without users do not stay. torch never removes a wait, and so never the gather that it waits for.
    """
    # wait_tensor is impure for torch, because its schema does not say that it waits (pytorch issue 126773, 132341).
    is_collective = getattr(node.target, "namespace", "") in (COLLECTIVES, f"{COLLECTIVES}_autograd")
    return draws(node) or not is_functional(node) or (node.is_impure() and not is_collective)


def drop_unused(graph_module: GraphModule) -> None:
    """Remove nodes that no other node uses, unless they stay."""
    graph_module.graph.eliminate_dead_code(is_impure_node=stays)
    graph_module.recompile()


# Joint graphs


def outputs_of(graph: Graph) -> list[Node | None]:
    """The outputs of a graph, flat; None for an output that is not a node."""
    (output,) = graph.find_nodes(op="output")
    return [value if isinstance(value, Node) else None for value in torch_private.tree_leaves(output.args)]


def depends_on_tangents(graph: Graph) -> set[Node]:
    """Nodes of a joint graph that belong to the backward because they are computed from tangents."""
    dependent: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent
