"""The passes over a traced step: `functionalize`, `tag`, `rematerialize`.

Each takes a GraphModule, and may be used without the others. Decisions stand in `node.meta` under torch's own names
(`recompute`, `ac_graph_id`), so that torch's partitioners read them as well.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compiled import tracing
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph import torch_private
from fastac.graph.nodes import (
    REGION_TAG,
    REPEATS,
    TAG,
    decisions_about,
    draws,
    drop_unused,
    is_backward,
    mark,
    marks,
    memory_of_value,
    op_of,
    regions,
    untag,
    value_of,
)
from fastac.graph.torch_private import BACKWARD_PHASE, is_functional, op_name
from fastac.policy import Policy
from fastac.registry import classify

Policies = Mapping[int, Policy]
"""Region -> policy."""

_WRITES_STATISTICS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Operators that change their running statistics although their schema does not say so (pytorch issue 73050)."""


# functionalize


def functionalize(graph_module: GraphModule) -> GraphModule:
    """The same graph without in-place operators, so that the value of a node depends only on its inputs.

    A recompute that repeats an in-place operator, or leaves one out, is silently wrong. An input that the graph changes
    is written once, at the end.

    Args:
        graph_module: a graph with traced values (`node.meta["val"]`), as `trace` makes it. It is not changed.

    Returns:
        Another GraphModule with the same inputs and outputs.

    Raises:
        FastacError: no traced values; an operator whose writes cannot be replaced; a tensor from outside the graph that
            is written; a changed input that shares its memory with another.

    Example:
        >>> functional = fastac.graph.functionalize(traced.graph_module)
    """
    mode = torch_private.fake_mode_of(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = map(value_of, placeholders)
    inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    # Only mutations: views may stay, as in eager mode. Copies in their place would cost memory.
    run = torch.func.functionalize(Interpreter(graph_module).run, remove="mutations")
    with mode, torch.no_grad(), preserve_node_meta():  # new nodes get the marks of the node that the Interpreter runs
        functional = make_fx(run)(*inputs)
    # Nothing runs for a placeholder: its marks are copied here.
    for old, new in zip(placeholders, functional.graph.find_nodes(op="placeholder"), strict=True):
        new.name = old.name
        mark(new, **marks(old))
    functional.graph.eliminate_dead_code()
    functional.recompile()
    refuse_writes(functional)
    return functional


def refuse_writes(graph_module: GraphModule) -> None:
    """Raise FastacError for an operator that writes, except for an input that gets its new value at the end."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node in graph_module.graph.nodes:
        if is_functional(node):
            continue
        # functionalize leaves a single kind of write: `copy_` into an input, as its epilogue.
        written = next((other for other in placeholders if node.args and other is node.args[0]), None)
        if node.target is not torch.ops.aten.copy_.default or written is None:
            raise FastacError(
                f"{node.target} writes its argument. If it ran again in the graph, or not at all, the result would be "
                f"silently wrong. Register the kernel as a functional torch.library.custom_op."
            )
        # As inputs of a trace the two are separate tensors: reads of the other one would miss the change.
        memory = memory_of_value(written)
        shared = [other for other in placeholders if other is not written and memory_of_value(other) == memory]
        if memory is not None and shared:
            raise FastacError(
                f"the step changes the input {written.name}, which shares its memory with {shared[0].name}: the graph "
                f"would not see the change there. Pass a copy."
            )


# tag


def tag(graph_module: GraphModule, policies: Policies | None = None) -> GraphModule:
    """Tag the nodes of every region as saved or recomputed, in place. Earlier tags are removed.

    It saves the outputs of attention that the policy saves, and the tensors that tell this attention what to attend to;
    the choices of sparse attention; random draws; and values that the forward reads outside of their region. Nodes of
    the backward get no tags.

    Args:
        graph_module: a functional graph with marked regions.
        policies: by region; by default those that the regions were checkpointed with.

    Returns:
        The same graph.

    Raises:
        PolicyNotAppliedError: no region, or attention that cannot be saved.
        UnsupportedBackendError: a kernel that does not train.
        FastacError: a kernel that was given a tensor to write.

    Example:
        >>> tagged = fastac.graph.tag(functional)
    """
    policies = own_policies(graph_module) if policies is None else policies
    for node in graph_module.graph.nodes:
        untag(node)
    for number, nodes in regions(graph_module).items():
        if not policies[number].checkpoints:
            continue
        saved = decide(graph_module, nodes, policies[number])
        for node in nodes:
            op = op_of(node)
            # Eager recompute restores generators and buffers first. A graph cannot: a second run would differ.
            differs = draws(op) or not is_functional(op) or op_name(op) in _WRITES_STATISTICS
            is_saved = differs or node in saved or op in saved
            node.meta[TAG] = CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta[REGION_TAG] = number
    _save_boundaries(graph_module)
    return graph_module


def own_policies(graph_module: GraphModule) -> dict[int, Policy]:
    """The policies that the regions of a traced step were checkpointed with."""
    policies = {number: marks(nodes[0])[tracing.POLICY] for number, nodes in regions(graph_module).items()}
    if not policies:
        raise PolicyNotAppliedError(
            "the graph has no checkpointed region: nothing would be saved or recomputed. Call fastac.enable(model) or "
            "fastac.checkpoint(block, ...) before tracing, trace with gradients on, and trace with fastac.graph.trace "
            "(or make_fx under torch.fx.traceback.preserve_node_meta(), which keeps the marks)."
        )
    return policies


def where(nodes: list[Node]) -> str:
    """The block of a region, given by its nodes: class and name."""
    return str(marks(nodes[0])[tracing.WHERE])


def decide(graph_module: GraphModule, nodes: list[Node], policy: Policy) -> set[object]:
    """The nodes that the policy saves in a region, and the nodes that tell sparse attention which blocks to attend to.

    Raises for attention that cannot be saved: see `tag`.
    """
    tracing.refuse_eager_only(policy, where(nodes))
    if not policy.is_selective:
        return set()
    saved: set[object] = set()
    for node, is_saved in decisions_about(graph_module, nodes, policy, where(nodes)).items():
        bound = classify(node.target)
        if is_saved and bound is not None:
            saved |= {node, *bound.selection(node.args, node.kwargs)}
    return saved


def _save_boundaries(graph_module: GraphModule) -> None:
    """Save the outputs of a region, which the rest of the forward reads: recomputation ends there, as in eager mode."""
    # torch's partitioners do the same for regions that follow each other (`cleanup_recompute_tags`).
    for node in graph_module.graph.nodes:
        if node.meta.get(TAG) is CheckpointPolicy.PREFER_RECOMPUTE and any(
            not is_backward(user) and user.meta.get(REGION_TAG) != node.meta[REGION_TAG] for user in node.users
        ):
            node.meta[TAG] = CheckpointPolicy.MUST_SAVE


# rematerialize


def rematerialize(graph_module: GraphModule) -> GraphModule:
    """The graph with the nodes that are tagged for recomputation copied into each backward, right before their use.

    torch has a pass for this as well. It refuses steps with several backwards that recompute (two losses, two
    micro-batches).

    Args:
        graph_module: a functional graph with tags. It is not changed.

    Returns:
        Another GraphModule, without tags: torch's own passes, which read them, would recompute again.

    Raises:
        FastacError: a node that is tagged for recomputation writes or draws random numbers.

    Example:
        >>> graph_module = fastac.graph.rematerialize(tagged)
    """
    # pytorch#180534 lets its pass skip backwards that recompute nothing. It raises for two that do (2.13 to 2.15). Once
    # it takes them, this loop may go.
    graph = Graph()
    copied: dict[Node, Node] = {}
    recomputed: dict[Node, Node] = {}  # in this backward
    values = ChainMap(recomputed, copied)
    for node in graph_module.graph.nodes:
        if _is_tagged_for_recompute(node) and (draws(node) or not is_functional(node)):
            what = "draws random numbers" if is_functional(node) else "writes its argument"
            raise FastacError(
                f"rematerialize: {node.target} is tagged for recomputation and {what}: a second run would differ. "
                f"Tag it as saved, as fastac.graph.tag does."
            )
        # The backward is over. The next one recomputes anew: values that live in between would cost their memory.
        if not is_backward(node):
            recomputed.clear()
        # Nodes compare by their place in the graph, so they are copied in its order.
        for needed in sorted(_needed(node, recomputed)) if is_backward(node) else ():
            recomputed[needed] = graph.node_copy(needed, values.__getitem__)
            recomputed[needed].name += "_recomputed"
            mark(recomputed[needed], **BACKWARD_PHASE, **{REPEATS: needed.name})
        copied[node] = graph.node_copy(node, values.__getitem__)
    for node in graph.nodes:
        untag(node)
    rematerialized = GraphModule(graph_module, graph)
    # Originals whose only users were in the backward are dead now: this is what frees the memory.
    drop_unused(rematerialized)
    return rematerialized


def _is_tagged_for_recompute(node: Node) -> bool:
    return node.meta.get(TAG) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _needed(node: Node, recomputed: Mapping[Node, Node]) -> set[Node]:
    """The nodes that must be recomputed, beside those that already are, for the inputs of a node of the backward."""
    needed: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if _is_tagged_for_recompute(source) and source not in needed and source not in recomputed:
            needed.add(source)
            waiting.extend(source.all_input_nodes)
    return needed
