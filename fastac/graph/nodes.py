"""What a node of a traced graph says of itself: forward or backward, its region, what it computes, its tags."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile.tracing import REGION
from fastac.engine import torch_private
from fastac.graph.torch_private import BACKWARD, is_drawing, is_tangent
from fastac.registry import AttentionOp, classify

STATE = "fastac_state"
"""Mark of an input that belongs to the model: its name."""

RECOMPUTED = "fastac_recomputed"
"""Mark of a node that was copied into the backward: the name of the node it repeats."""

TAG, REGION_TAG = "recompute", "ac_graph_id"
"""Where torch's partitioners look for what happens to a node, and for its region (`node.meta`)."""

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def marks(node: Node) -> dict[str, Any]:
    """What was annotated while the node was traced."""
    return node.meta.get("custom") or {}


def mark(node: Node, **new: Any) -> None:
    """Add marks to a node; others that share the dict keep theirs."""
    node.meta["custom"] = {**marks(node), **new}


def is_getitem(node: Node) -> bool:
    """Whether a node takes one of several outputs of another."""
    return node.op == "call_function" and node.target is operator.getitem


def is_backward(node: Node) -> bool:
    """Whether autograd's engine ran the node. torch's own tracing says so in another place than annotations do.

    One of several outputs belongs where its op does: its own marks may be lost. The same holds for regions.
    """
    if is_getitem(node) and isinstance(node.args[0], Node):
        return is_backward(node.args[0])
    return marks(node).get("phase") == BACKWARD["phase"] or bool(node.meta.get("autograd_backward"))


def region_of(node: Node) -> int | None:
    """The number of the region that a node of the forward was traced in."""
    if is_getitem(node) and isinstance(node.args[0], Node):
        return region_of(node.args[0])
    if node.op != "call_function" or is_backward(node):
        return None
    return marks(node).get(REGION)


def regions(graph_module: GraphModule) -> dict[int, list[Node]]:
    """Region -> its nodes in the forward, in order."""
    found: dict[int, list[Node]] = {}
    for node in graph_module.graph.nodes:
        number = region_of(node)
        if number is not None:
            found.setdefault(number, []).append(node)
    return found


def is_recomputed(node: Node) -> bool:
    """Whether a node is tagged to be run again in backward."""
    return node.meta.get(TAG) in _RECOMPUTE


def value_of(node: Node) -> Any:
    """What a node returned when it was traced: fake tensors, numbers."""
    return node.meta.get("val")


def as_parameter(value: Any) -> Any:
    """A traced value as the parameter it was: a product with a weight is no attention."""
    return torch.nn.Parameter(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def call(graph_module: GraphModule, node: Node) -> tuple[Any, Any]:
    """The arguments of a node, by position and by name, with traced values in the place of nodes."""

    def value(source: Node) -> Any:
        if source.op == "get_attr" and "val" not in source.meta:
            return getattr(graph_module, str(source.target), None)
        return as_parameter(value_of(source)) if STATE in marks(source) else value_of(source)

    return map_arg(node.args, value), map_arg(node.kwargs, value)


def memory_of_value(node: Node) -> object:
    """What identifies the memory of a node's traced value; None for a value that is no tensor."""
    value = value_of(node)
    return torch_private.memory(value) if isinstance(value, torch.Tensor) else None


def is_attention(node: Node) -> bool:
    """Whether a node runs an attention forward, by the rows of the registry."""
    resolved = classify(node.target) if node.op == "call_function" else None
    return resolved is not None and isinstance(resolved.row, AttentionOp)


def draws(node: Node) -> bool:
    """Whether a node draws random numbers. torch says so of all attention; here its row decides."""
    resolved = classify(node.target) if node.op == "call_function" else None
    if resolved is not None and isinstance(resolved.row, AttentionOp):
        return resolved.draws(map_arg(node.args, value_of), map_arg(node.kwargs, value_of))
    return is_drawing(node)


# Joint graphs


def outputs_of(graph: Graph) -> list[Node | None]:
    """What a graph returns, flat; None for what is no node."""
    (output,) = graph.find_nodes(op="output")
    return [value if isinstance(value, Node) else None for value in torch_private.tree_leaves(output.args)]


def depends_on_tangents(graph: Graph) -> set[Node]:
    """Nodes of a joint graph that belong to the backward because of what they are computed from."""
    dependent: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent
