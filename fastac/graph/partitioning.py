"""Splits a joint graph as a policy says: saves attention, recomputes gathered parameters, and marks all saves.

FSDP in a traced graph is an all-gather of each parameter. To save its output is to hold the unsharded weights. To save
what follows is the same: partitioners that were told to recompute the all-gather saved the transposed weight. So the
whole chain is tagged: casts and slices before the gather, the gather, its wait, and every layout op after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compiled.tracing import refuse_eager_only
from fastac.engine import releases
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.graph import torch_private
from fastac.graph.nodes import (
    STATE,
    TAG,
    calls,
    decisions_about,
    depends_on_tangents,
    draws,
    drop_unused,
    is_getitem,
    mark,
    untag,
)
from fastac.graph.saved_values import mark_saved
from fastac.graph.torch_private import COLLECTIVES, is_drawing, is_parameter, is_tangent, op_name, returns_views
from fastac.policy import Policy, resolve

Graphs = tuple[GraphModule, GraphModule]
Partition = Callable[..., Graphs]


def partitioner(policy: str | Policy = "attn_only", *, recompute_gathers: bool = True) -> Partition:
    """A partitioner that saves attention as the policy says, never a gathered parameter, and marks what it saved.

    Args:
        policy: a name or a Policy, for all attention of the graph. torch's min-cut decides about everything else.
        recompute_gathers: whether all-gathers of parameters run again in backward, with the ops that lay out their
            result.

    Returns:
        A callable for AOT's `partition_fn` and for inductor's `custom_partitioner_fn`. It raises PolicyNotAppliedError
        when attention cannot be saved, and FastacError when the backward would draw other random numbers.

    Raises:
        FastacError: a mapping of block names was given: a joint graph has no blocks.

    Example:
        >>> options = {"custom_partitioner_fn": fastac.graph.partitioner("attn_only")}
        >>> compiled = torch.compile(model, options=options)
    """
    releases.need_traces()
    refuse_eager_only(policy := resolve(policy))
    return _PolicyPartitioner(policy, recompute_gathers)


class _PolicyPartitioner(torch_private.Partitioner):
    def __init__(self, policy: Policy, gathers: bool) -> None:
        self.policy, self.gathers = policy, gathers

    def __call__(
        self, joint: GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
    ) -> Graphs:
        parameters = parameters_of(joint.graph, options.get("static_lifetime_input_indices"))
        for node in parameters:
            mark(node, **{STATE: node.name})  # `arguments_of` knows a product with a weight by this mark
        attention = {node.name for node in _tag_attention(joint, self.policy)}
        if self.gathers:
            recompute_parameter_gathers(joint.graph, parameters)
        forward, backward = partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        # With a memory budget of 0 torch's partitioner saves only inputs, and never looks at tags (pytorch#190758).
        if recomputed := [node.name for node in calls(backward.graph) if node.name in attention]:
            raise CompiledPolicyNotAppliedError(
                f"{self.policy}: torch's partitioner runs attention again in backward: {', '.join(recomputed)}. "
                f"activation_memory_budget=0 does that: set it to more."
            )
        mark_saved(forward, backward, num_fwd_outputs=num_fwd_outputs)
        return forward, backward


def partition(joint: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
    """Split a tagged joint graph. Raises FastacError if the backward would draw other random numbers.

    torch wraps each op that is recomputed and may draw random numbers, to restore its generator. It cannot trace a
    wrapped op again. Attention that draws none in this call is not wrapped.
    """
    # torch goes by a tag that all its attention has, with dropout or without (pytorch#187985). 2.15 looks at the
    # argument dropout_p. Once that is the oldest release, only kernels with another argument need `_unseeded`.
    for node in joint.graph.nodes:
        if node.meta.get(TAG) is CheckpointPolicy.MUST_RECOMPUTE and is_drawing(node) and not draws(node):
            node.target = _unseeded(node.target)
    forward, backward = torch_private.min_cut(joint, joint_inputs, **options)
    for module in (forward, backward):
        # The wrapper has done its work: other passes must find the op.
        for node in module.graph.nodes:
            node.target = getattr(node.target, "fastac_op", node.target)
        drop_unused(module)
    # Silently wrong gradients without this check: pytorch#190717 and pytorch#190758, with a memory budget below 1. If
    # pytorch#190759 lands, torch saves what it draws.
    drawn = {node.name for node in forward.graph.nodes if draws(node)}
    if twice := [node.name for node in backward.graph.nodes if node.name in drawn and draws(node)]:
        raise FastacError(
            f"torch's partitioner runs ops in backward again that draw random numbers, and does not restore their "
            f"generator: {', '.join(twice)}. Gradients would be wrong. It does so under activation_memory_budget (set "
            f"it to 1), and with ops without torch.Tag.nondeterministic_seeded (save them, or turn their dropout off)."
        )
    return forward, backward


@functools.cache
def _unseeded(op: Any) -> Callable[..., Any]:
    """A function that calls an op, and that torch does not wrap: it has no tags."""

    def call_op(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    call_op.__name__ = call_op.__qualname__ = str(op).replace(".", "_")
    call_op.fastac_op = op  # type: ignore[attr-defined]
    return call_op


def _tag_attention(joint: GraphModule, policy: Policy) -> list[Node]:
    """Tag the attention calls of a joint graph's forward. Returns those to be saved."""
    dependent = depends_on_tangents(joint.graph)
    forward = [node for node in calls(joint.graph) if node not in dependent]
    decisions = decisions_about(joint, forward, policy)
    for node, is_saved in decisions.items():
        # An op with several outputs is a tuple in the graph. torch saves its items, so these have the tag, too.
        for tagged in (node, *filter(is_getitem, node.users)):
            _tag(tagged, CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE)
    return [node for node, is_saved in decisions.items() if is_saved]


def _tag(node: Node, decision: CheckpointPolicy) -> None:
    """Tag a node, and remove it from its region: torch saves every node of a region that another region reads."""
    untag(node)
    node.meta[TAG] = decision


# Gathered parameters

_GATHERS = {f"{COLLECTIVES}::all_gather_into_tensor", f"{COLLECTIVES}::all_gather_into_tensor_coalesced"}
_COPIES = {
    f"{COLLECTIVES}::wait_tensor",
    "aten::_to_copy",
    "aten::_unsafe_view",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::contiguous",
    "aten::copy",
    "aten::reshape",
    "aten::split_with_sizes_copy",
    "aten::stack",
    "aten::view_copy",
    "prims::convert_element_type",
}
"""Ops that copy, or wait for a copy, and compute nothing. Ops that return views are known by their schema."""


def is_gather(node: Node) -> bool:
    """Whether a node is a functional all-gather."""
    return op_name(node) in _GATHERS


def parameters_of(graph: Graph, static_indices: Iterable[int] | None = None) -> list[Node]:
    """Placeholders of a joint graph that hold parameters: those that AOT describes so, and inputs that stay in place.

    static_indices: `static_lifetime_input_indices` of a partitioner, which count the inputs of the forward. Only these
    show parameters in a graph without descriptions.
    """
    primals = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    static = set(static_indices or ())
    return [node for index, node in enumerate(primals) if is_parameter(node) or index in static]


def recompute_parameter_gathers(graph: Graph, parameters: Collection[Node]) -> list[Node]:
    """Tag the chains from parameters through an all-gather as MUST_RECOMPUTE.

    A node belongs to a chain if all its inputs come from parameters and it gathers, waits, casts, or lays out. So a
    gather of an activation is not in a chain.

    Args:
        graph: a joint graph. torch's partitioners and its rematerialization pass read the tags.
        parameters: its placeholders that hold parameters.

    Returns:
        The nodes of the chains, in order.

    Example:
        >>> fastac.graph.recompute_parameter_gathers(joint.graph, parameters)
    """
    laid_out = set(parameters)
    chain: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_layout = is_getitem(node) or returns_views(node) or op_name(node) in _COPIES
        # laid_out: everything that holds numbers of parameters, in some layout, and nothing computed.
        if inputs and laid_out.issuperset(inputs) and (is_gather(node) or is_layout):
            laid_out.add(node)
            if is_gather(node) or not chain.isdisjoint(inputs):
                chain.add(node)
    # The chain so far begins at the gather. Add what leads from the parameter to it: the cast to bf16, for instance.
    leads_to_gather = set(filter(is_gather, chain))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not leads_to_gather.isdisjoint(node.users):
            leads_to_gather.add(node)
    tagged = [node for node in graph.nodes if node in chain or node in leads_to_gather]
    for node in tagged:
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    return tagged
