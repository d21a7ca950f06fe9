"""Splits a joint graph as a policy says: attention saved, gathered parameters recomputed, and all saves marked.

FSDP in a traced graph is an all-gather of each parameter, and saving its output pins the unsharded weights. Saving what
follows does so as well: partitioners that were told to recompute the all-gather saved the transposed weight. So the
whole chain is tagged: casts and slices before the gather, the gather, its wait, and every layout op after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile.tracing import Decisions, refuse_eager_only
from fastac.engine import releases
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.graph import torch_private
from fastac.graph.nodes import (
    REGION_TAG,
    TAG,
    as_parameter,
    depends_on_tangents,
    draws,
    is_getitem,
    value_of,
)
from fastac.graph.saved_values import mark_saved
from fastac.graph.torch_private import COLLECTIVES, is_drawing, is_parameter, is_tangent, schema_of
from fastac.policy import Policy, resolve

Graphs = tuple[GraphModule, GraphModule]
Partition = Callable[..., Graphs]


def partitioner(policy: str | Policy = "attn_only", *, recompute_gathers: bool = True) -> Partition:
    """A partitioner that saves attention as the policy says, never a gathered parameter, and marks what it saved.

    Args:
        policy: a name or a Policy, for all attention of the graph. torch's min-cut decides about everything else.
        recompute_gathers: whether all-gathers of parameters run again in backward, with what lays out their result.

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
    made: Partition = _PolicyPartitioner(policy, recompute_gathers)
    return made


class _PolicyPartitioner(torch_private.Partitioner):
    def __init__(self, policy: Policy, gathers: bool) -> None:
        self.policy, self.gathers = policy, gathers

    def __call__(
        self, joint: GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
    ) -> Graphs:
        parameters = parameters_of(joint.graph, options.get("static_lifetime_input_indices"))
        attention = {node.name for node in _tag_attention(joint.graph, self.policy, set(parameters))}
        if self.gathers:
            recompute_parameter_gathers(joint.graph, parameters)
        forward, backward = partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        again = [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in attention]
        if again:
            raise CompiledPolicyNotAppliedError(
                f"{self.policy}: torch's partitioner runs attention again in backward: {', '.join(again)}. "
                f"activation_memory_budget=0 does that: set it to more."
            )
        mark_saved(forward, backward, num_fwd_outputs=num_fwd_outputs)
        return forward, backward


def partition(joint: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
    """Split a tagged joint graph. Raises FastacError where the backward would draw other random numbers.

    torch wraps each op that is recomputed and may draw random numbers, so that its generator is restored, and cannot
    trace such a wrapped op again. Attention that draws none in this call goes without.
    """
    for node in joint.graph.nodes:
        if node.meta.get(TAG) is CheckpointPolicy.MUST_RECOMPUTE and is_drawing(node) and not draws(node):
            node.target = _unseeded(node.target)
    forward, backward = torch_private.min_cut(joint, joint_inputs, **options)
    for module in (forward, backward):
        for node in module.graph.nodes:
            node.target = getattr(node.target, "fastac_op", node.target)
        drop_dead_collectives(module)
    in_forward = {node.name for node in forward.graph.nodes if node.op == "call_function" and draws(node)}
    if twice := [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in in_forward and draws(n)]:
        raise FastacError(
            f"torch's partitioner runs ops in backward again that draw random numbers, and does not restore their "
            f"generator: {', '.join(twice)}. Gradients would be wrong. It does so under activation_memory_budget (set "
            f"it to 1), and with ops without torch.Tag.nondeterministic_seeded (save them, or turn their dropout off)."
        )
    return forward, backward


@functools.cache
def _unseeded(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    call.__name__ = call.__qualname__ = str(op).replace(".", "_")
    call.fastac_op = op  # type: ignore[attr-defined]
    return call


def _tag_attention(graph: Graph, policy: Policy, parameters: set[Node]) -> list[Node]:
    """Tag the attention calls of a joint graph's forward, and return those to be saved."""
    saved = []
    decisions = Decisions(policy)
    dependent = depends_on_tangents(graph)

    def value(node: Node) -> Any:
        return as_parameter(value_of(node)) if node in parameters else value_of(node)

    for node in graph.nodes:
        if node.op != "call_function" or node in dependent or is_getitem(node):
            continue
        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        decision = decisions.of(node.target, args, kwargs, value_of(node))
        if decision:
            saved.append(node)
        if decision is not None:
            for one in (node, *filter(is_getitem, node.users)):
                _tag(one, CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.MUST_RECOMPUTE)
    decisions.check()
    return saved


def _tag(node: Node, decision: CheckpointPolicy) -> None:
    """Regions of checkpointing do not count for the node: torch would save what one makes and the next one reads."""
    node.meta[TAG] = decision
    node.meta.pop(REGION_TAG, None)


# Gathered parameters

_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
_COPIES = {
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
"""Ops that copy and compute nothing. Ops that return views are known by their schema."""


def is_gather(node: Node) -> bool:
    """Whether a node is a functional all-gather."""
    schema = schema_of(node)
    return schema is not None and schema.name in {f"{COLLECTIVES}::{name}" for name in _GATHERS}


def _is_layout(node: Node) -> bool:
    if is_getitem(node):
        return True
    schema = schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    if schema.name in _COPIES or schema.name == f"{COLLECTIVES}::wait_tensor":
        return True
    return any(returned.alias_info is not None for returned in schema.returns)


def parameters_of(graph: Graph, static_indices: Iterable[int] | None = None) -> list[Node]:
    """Placeholders of a joint graph that hold parameters: where AOT says so, or else its inputs that stay in place.

    static_indices: `static_lifetime_input_indices` of a partitioner, which count the inputs of the forward. Inputs
    that are not described at all count by these alone.
    """
    primals = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    static = set(static_indices or ())
    return [node for i, node in enumerate(primals) if is_parameter(node) or i in static]


def recompute_parameter_gathers(graph: Graph, parameters: Collection[Node]) -> list[Node]:
    """Tag the chains from parameters through an all-gather as MUST_RECOMPUTE.

    A node belongs to a chain when all its inputs come from parameters and it gathers, waits, casts, or lays out, so
    that gathers of activations are in none.

    Args:
        graph: a joint graph. torch's partitioners and its rematerialization pass read the tags.
        parameters: its placeholders that hold parameters.

    Returns:
        The nodes of the chains, in order.

    Example:
        >>> fastac.graph.recompute_parameter_gathers(joint.graph, parameters)
    """
    laid_out = set(parameters)
    gathered: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs or not laid_out.issuperset(inputs):
            continue
        if is_gather(node) or _is_layout(node):
            laid_out.add(node)
            if is_gather(node) or not gathered.isdisjoint(inputs):
                gathered.add(node)
    before = [node for node in gathered if is_gather(node)]
    while before:
        for node in before.pop().all_input_nodes:
            if node not in gathered and node.op == "call_function":
                gathered.add(node)
                before.append(node)
    chain = [node for node in graph.nodes if node in gathered]
    for node in chain:
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    return chain


def drop_dead_collectives(module: GraphModule) -> None:
    """Take collectives that nobody uses out of a graph. For torch a wait is never dead, so it keeps its gather too."""

    def is_impure(node: Node) -> bool:
        schema = schema_of(node)
        return bool(node.is_impure()) and not (
            schema is not None and schema.name.startswith(f"{COLLECTIVES}::") and not schema.is_mutable
        )

    module.graph.eliminate_dead_code(is_impure_node=is_impure)
    module.recompile()
