"""All-gathers of parameters are recomputed in backward, with all that only lays the gathered weight out anew.

FSDP in a traced graph is an all-gather of each parameter, and saving its output pins the unsharded weights. Saving
what follows does so as well: partitioners that were told to recompute the all-gather saved the transposed weight. So
the whole chain is tagged: casts and slices before the gather, the gather, its wait, and every layout op after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fastac.graph import internals
from fastac.graph.nodes import REGION_TAG, TAG, is_getitem

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
    schema = internals.schema_of(node)
    return schema is not None and schema.name in {f"{internals.COLLECTIVES}::{name}" for name in _GATHERS}


def _is_layout(node: Node) -> bool:
    if is_getitem(node):
        return True
    schema = internals.schema_of(node)
    if schema is None or schema.is_mutable:
        return False
    if schema.name in _COPIES or schema.name == f"{internals.COLLECTIVES}::wait_tensor":
        return True
    return any(returned.alias_info is not None for returned in schema.returns)


def parameters_of(graph: Graph, static_indices: Iterable[int] | None = None) -> list[Node]:
    """Placeholders of a joint graph that hold parameters: where AOT says so, or else its inputs that stay in place.

    static_indices: `static_lifetime_input_indices` of a partitioner, which count the inputs of the forward. Inputs
    that are not described at all count by these alone.
    """
    primals = [node for node in graph.find_nodes(op="placeholder") if not internals.is_tangent(node)]
    static = set(static_indices or ())
    return [node for i, node in enumerate(primals) if internals.says_parameter(node) or i in static]


def parameter_gathers(graph: Graph, parameters: Collection[Node]) -> list[Node]:
    """Every node of the chains from parameters through an all-gather, in order.

    A node belongs to a chain when all its inputs come from parameters and it gathers, waits, casts, or lays out.
    Activations' gathers are in no chain.
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
    return [node for node in graph.nodes if node in gathered]


def recompute_parameter_gathers(graph: Graph, parameters: Collection[Node]) -> list[Node]:
    """Tag the chains of `parameter_gathers` as MUST_RECOMPUTE and return their nodes.

    The tag is what torch's partitioners and its remat pass read. Regions of activation checkpointing do not count for
    these nodes: torch would save what is gathered in one region and used in the next.
    """
    chain = parameter_gathers(graph, parameters)
    for node in chain:
        node.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta.pop(REGION_TAG, None)
    return chain


def drop_dead_collectives(module: torch.fx.GraphModule) -> None:
    """Take collectives that nobody uses out of a graph. For torch a wait is never dead, so it keeps its gather too."""

    def is_impure(node: Node) -> bool:
        schema = internals.schema_of(node)
        return bool(node.is_impure()) and not (
            schema is not None and schema.name.startswith(f"{internals.COLLECTIVES}::") and not schema.is_mutable
        )

    module.graph.eliminate_dead_code(is_impure_node=is_impure)
    module.recompile()
