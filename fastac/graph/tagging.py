"""tag: which nodes of a step's forward are saved and which run again, by the policy and the rows of the registry.

Nothing here changes the graph: decisions stand in `node.meta`, under torch's own names (`recompute`, `ac_graph_id`), so
that torch's partitioners read them as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile import tracing as annotation
from fastac.compile.tracing import Decisions
from fastac.errors import PolicyNotAppliedError
from fastac.graph.internals import is_functional
from fastac.graph.nodes import (
    REGION_TAG,
    TAG,
    call,
    draws,
    is_backward,
    is_getitem,
    marks,
    regions,
)
from fastac.policy import Policy
from fastac.registry import classify
from fastac.registry import AttentionOp

Policies = Mapping[int, Policy]
"""Region -> policy."""

_WRITES_STATISTICS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Operators that change their running statistics although their schema does not say so."""


def own_policies(graph_module: GraphModule) -> dict[int, Policy]:
    """The policies that the regions of a traced step were checkpointed with.

    Raises PolicyNotAppliedError for a graph without regions.
    """
    found = {number: annotation.policy_of(_marks(nodes)) for number, nodes in regions(graph_module).items()}
    if not found:
        raise PolicyNotAppliedError(
            "the graph has no checkpointed region: nothing would be saved or recomputed. Call fastac.enable(model) or "
            "fastac.checkpoint(block, ...) before tracing, trace with gradients on, and trace with fastac.graph.trace "
            "(or make_fx under torch.fx.traceback.preserve_node_meta(), which keeps the marks)."
        )
    return found


def where(nodes: list[Node]) -> str:
    """The block that a region, given by its nodes, belongs to: class and name."""
    return annotation.where(_marks(nodes))


def _marks(nodes: list[Node]) -> dict[str, Any]:
    return next(marks(node) for node in nodes if annotation.REGION in marks(node))


def tag(graph_module: GraphModule, policies: Policies | None = None) -> GraphModule:
    """Tag the nodes of every region as saved or recomputed, in place; tags of before are gone.

    Saved are the outputs of attention that the policy saves and what it was told to attend to, what sparse attention
    chose, what draws random numbers, and what leaves its region. The backward has no tags.
    policies: by region; by default those that the regions were checkpointed with.
    Raises PolicyNotAppliedError for attention that can not be saved, UnsupportedBackendError for a kernel that does not
    train, FastacError for one that was given a tensor to write.
    """
    policies = own_policies(graph_module) if policies is None else policies
    for node in graph_module.graph.nodes:
        for name in (TAG, REGION_TAG):
            node.meta.pop(name, None)
    for number, nodes in regions(graph_module).items():
        saved = decide(graph_module, nodes, policies[number])
        for node in nodes:
            _tag(node, number, saved)
    _save_boundaries(graph_module)
    return graph_module


def saves(graph_module: GraphModule, node: Node, policy: Policy) -> bool:
    """Whether a node is an attention call that the policy saves."""
    resolved = classify(node.target)
    return (
        resolved is not None
        and isinstance(resolved.row, AttentionOp)
        and bool(policy.saves(resolved.keys(*call(graph_module, node))))
    )


def _tag(node: Node, number: int, saved: set[Node]) -> None:
    node.meta[REGION_TAG] = number
    parent = node.args[0] if is_getitem(node) else None
    if isinstance(parent, Node):
        node.meta[TAG] = parent.meta.get(TAG, CheckpointPolicy.MUST_SAVE)
        return
    if node in saved:
        for chosen in _selection(node):
            chosen.meta[TAG] = CheckpointPolicy.MUST_SAVE
    if node in saved or _would_differ(node):
        node.meta[TAG] = CheckpointPolicy.MUST_SAVE
    else:
        node.meta.setdefault(TAG, CheckpointPolicy.PREFER_RECOMPUTE)


def _selection(node: Node) -> list[Node]:
    """The nodes that hold the blocks which a sparse attention was told to attend to."""
    resolved = classify(node.target)
    if resolved is None:
        return []
    chosen: Sequence[object] = resolved.selection(node.args, node.kwargs)
    return [one for one in chosen if isinstance(one, Node)]


def _would_differ(node: Node) -> bool:
    """Whether a node would do something else when it ran again, whatever the policy."""
    return draws(node) or not is_functional(node) or _name(node) in _WRITES_STATISTICS


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else ""


def _save_boundaries(graph_module: GraphModule) -> None:
    """Save what a region gives to the rest of the forward: it ends there, as a checkpointed function does."""
    for node in graph_module.graph.nodes:
        if node.meta.get(TAG) is CheckpointPolicy.PREFER_RECOMPUTE and any(
            not is_backward(user) and user.meta.get(REGION_TAG) != node.meta[REGION_TAG] for user in node.users
        ):
            node.meta[TAG] = CheckpointPolicy.MUST_SAVE


def decide(graph_module: GraphModule, nodes: list[Node], policy: Policy) -> set[Node]:
    """The nodes of a region that the policy saves. Raises for what it can not be kept for: see `tag`."""
    if policy.saves_nothing:
        return set()
    decisions = Decisions(policy)
    saved = {
        node
        for node in nodes
        if not is_getitem(node) and decisions.of(node.target, *call(graph_module, node), node.meta.get("val"))
    }
    failure = decisions.failure()
    if failure is not None:
        raise PolicyNotAppliedError(f"{where(nodes)}: {failure}")
    return saved
