"""What a node of a traced step tells: whether it is of the backward, its region, its value."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile.tracing import REGION
from fastac.graph.internals import BACKWARD, is_drawing, schema_of
from fastac.registry import classify
from fastac.registry import AttentionOp

Constant = TypeVar("Constant")

STATE = "fastac_state"
"""Mark of an input that is the model's: its name."""

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


def is_backward(node: Node) -> bool:
    """Whether autograd's engine ran the node. torch's own tracing says so in another place than annotations do.

    One of several outputs belongs where its op does: what it is marked with itself may be lost. So with regions.
    """
    if is_getitem(node) and isinstance(node.args[0], Node):
        return is_backward(node.args[0])
    return marks(node).get("phase") == BACKWARD["phase"] or bool(node.meta.get("autograd_backward"))


def is_getitem(node: Node) -> bool:
    """Whether a node takes one of several outputs of another."""
    return node.op == "call_function" and node.target is operator.getitem


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


def is_of_region(node: Node) -> bool:
    """Whether a node is of a checkpointed region, in the forward or recomputed; by our marks or by torch's tags."""
    return REGION in marks(node) or REGION_TAG in node.meta


def recomputed_region(node: Node) -> int | None:
    """The number of the region that a node of the backward repeats; None for others. torch's pass keeps its own."""
    if not is_backward(node):
        return None
    return marks(node).get(REGION) if RECOMPUTED in marks(node) else node.meta.get(REGION_TAG)


def is_recomputed(node: Node) -> bool:
    """Whether a node is tagged to be run again in backward."""
    return node.meta.get(TAG) in _RECOMPUTE


def values(graph_module: GraphModule, arguments: Any) -> Any:
    """Arguments of a node with the traced values (fake tensors) in the place of nodes.

    A weight of the model is given as the parameter it was in the trace.
    """

    def value(node: Node) -> Any:
        if node.op == "get_attr" and "val" not in node.meta:
            return getattr(graph_module, str(node.target), None)
        found = node.meta.get("val")
        if STATE in marks(node) and isinstance(found, torch.Tensor) and found.is_floating_point():
            return torch.nn.Parameter(found)
        return found

    return map_arg(arguments, value)


def call(graph_module: GraphModule, node: Node) -> tuple[Any, Any]:
    """The arguments of a node, by position and by name, as `values` gives them."""
    return values(graph_module, node.args), values(graph_module, node.kwargs)


def is_attention(node: Node) -> bool:
    """Whether a node runs an attention forward, by the rows of the registry."""
    resolved = classify(node.target) if node.op == "call_function" else None
    return resolved is not None and isinstance(resolved.row, AttentionOp)


def value_of(node: Node) -> Any:
    """What a node returned when it was traced: fake tensors, numbers."""
    return node.meta.get("val")


def draws(node: Node) -> bool:
    """Whether a node draws random numbers: attention, which torch says it of in any case, where its row says so."""
    resolved = classify(node.target) if node.op == "call_function" else None
    if resolved is not None and isinstance(resolved.row, AttentionOp):
        return resolved.draws(map_arg(node.args, value_of), map_arg(node.kwargs, value_of))
    return is_drawing(node)


def constants(graph_module: GraphModule, kind: type[Constant]) -> Iterator[tuple[Node, Constant]]:
    """The nodes of a graph that hold a value of a kind that was there before the trace, and the value."""
    for node in graph_module.graph.nodes:
        constant = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(constant, kind):
            yield node, constant


def writer_of(node: Node) -> Node | None:
    """A node that writes the memory of another, itself or through a view of it, as operators' schemas say."""
    for user in node.users:
        schema = schema_of(user)
        if schema is None:
            continue
        given = {argument.name: value for argument, value in zip(schema.arguments, user.args, strict=False)}
        given.update(user.kwargs)
        for argument in schema.arguments:
            value = given.get(argument.name)
            takes = value is node or (isinstance(value, (list, tuple)) and node in value)
            if not takes or argument.alias_info is None:
                continue
            writer = user if argument.alias_info.is_write else writer_of(user)
            if writer is not None:
                return writer
    return None
