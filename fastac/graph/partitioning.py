"""Splits a joint graph as a policy says: attention saved, gathered parameters recomputed, and all saves marked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile.tracing import Decisions
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.graph import internals
from fastac.graph.gathers import drop_dead_collectives, parameters_of, recompute_parameter_gathers
from fastac.graph.marks import depends_on_tangents, mark_saved, outputs_of, saved_nodes
from fastac.graph.nodes import REGION_TAG, TAG, draws, is_getitem, value_of
from fastac.policy import Policy, resolve

Graphs = tuple[GraphModule, GraphModule]
Partition = Callable[..., Graphs]


class _PolicyPartitioner(internals.CustomPartitioner):  # type: ignore[misc]
    """What `partitioner` returns: a callable for AOT's `partition_fn` and for inductor's `custom_partitioner_fn`."""

    def __init__(self, policy: Policy, gathers: bool, then: Partition) -> None:
        self.policy, self.gathers, self.then = policy, gathers, then

    def __call__(
        self,
        joint: GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **options: Any,
    ) -> Graphs:
        dependent = depends_on_tangents(joint.graph)
        parameters = parameters_of(joint.graph, static_lifetime_input_indices)
        saved = _tag_attention(joint.graph, self.policy, dependent, set(parameters))
        chain = recompute_parameter_gathers(joint.graph, parameters) if self.gathers else []
        kept_out = {node.name for node in chain}
        attention = {node.name for node in saved}
        forward, backward = partition(
            self.then,
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            **options,
        )
        again = [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in attention]
        if again:
            raise CompiledPolicyNotAppliedError(
                f"{self.policy}: the partitioner {_name(self.then)} runs attention again in backward: "
                f"{', '.join(again)}. It must obey node.meta['recompute'], as torch's min-cut does."
            )
        returned = {node.name for node in outputs_of(forward.graph)[:num_fwd_outputs] if node is not None}
        pinned = [n.name for n in saved_nodes(forward, num_fwd_outputs) if n.name in kept_out - returned]
        if pinned:
            raise CompiledPolicyNotAppliedError(
                f"{self.policy}: the partitioner {_name(self.then)} saves gathered parameters: {', '.join(pinned)}. "
                f"It must obey node.meta['recompute'], as torch's min-cut does."
            )
        mark_saved(forward, backward, num_fwd_outputs=num_fwd_outputs)
        return forward, backward

    def uuid(self) -> None:
        """None: inductor must not take from its cache what another partitioner made."""


def partition(then: Partition, joint: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
    """Split a tagged joint graph. Raises FastacError where the backward would draw other random numbers.

    torch wraps each op that is recomputed and may draw random numbers, so that its generator is restored, and can not
    trace such a wrapped op again. Attention that draws none in this call goes without.
    """
    for node in joint.graph.nodes:
        if node.meta.get(TAG) is CheckpointPolicy.MUST_RECOMPUTE and internals.is_drawing(node) and not draws(node):
            node.target = _unseeded(node.target)
    forward, backward = then(joint, joint_inputs, **options)
    for module in (forward, backward):
        for node in module.graph.nodes:
            node.target = getattr(node.target, "fastac_op", node.target)
        drop_dead_collectives(module)
    in_forward = {node.name for node in forward.graph.nodes if node.op == "call_function" and draws(node)}
    if twice := [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in in_forward and draws(n)]:
        raise FastacError(
            f"The partitioner {_name(then)} runs ops in backward again that draw random numbers, without restoring the "
            f"generator: {', '.join(twice)}. Gradients would be wrong. torch's min-cut does that under "
            f"activation_memory_budget: set it to 1, or recompute by policy and tags."
        )
    return forward, backward


@functools.cache
def _unseeded(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    call.__name__ = call.__qualname__ = str(op).replace(".", "_")
    call.fastac_op = op  # type: ignore[attr-defined]
    return call


def partitioner(
    policy: str | Policy = "attn_only", *, recompute_gathers: bool = True, then: Partition = internals.min_cut
) -> Partition:
    """A partitioner that saves attention as the policy says, never a gathered parameter, and marks what it saved.

    then: what splits the tagged graph: torch's min-cut or a partitioner that obeys node.meta["recompute"] as it does.
    What the policy says nothing about is its decision. The result serves as AOT's `partition_fn` and as inductor's
    `custom_partitioner_fn`. Calling it raises PolicyNotAppliedError when attention can not be saved.
    """
    if isinstance(policy, Mapping):
        raise FastacError(
            "partitioner: a mapping of block names was given, and a joint graph has no blocks. Give a name or a "
            "fastac.Policy, which counts for all attention of the graph."
        )
    made: Partition = _PolicyPartitioner(resolve(policy), recompute_gathers, then)
    return made


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _tag_attention(graph: Graph, policy: Policy, dependent: set[Node], parameters: set[Node]) -> list[Node]:
    """Tag the attention calls of a joint graph's forward, and return those to be saved."""
    saved = []
    decisions = Decisions(policy)

    def value(node: Node) -> Any:
        found = node.meta.get("val")
        if node in parameters and isinstance(found, torch.Tensor) and found.is_floating_point():
            return torch.nn.Parameter(found)  # a product with a weight is no attention
        return found

    for node in graph.nodes:
        if node.op != "call_function" or node in dependent or is_getitem(node):
            continue
        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        decision = decisions.of(node.target, args, kwargs, value_of(node))
        if decision:
            saved.append(node)
            _tag(node, CheckpointPolicy.MUST_SAVE)
        elif decision is not None:
            _check_draws(node)
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    failure = decisions.failure()
    if failure is not None:
        raise CompiledPolicyNotAppliedError(failure)
    return saved


def _check_draws(node: Node) -> None:
    if draws(node) and not internals.is_drawing(node):
        raise FastacError(
            f"partitioner: {node.target} draws random numbers in this call and the policy lets it run again in "
            f"backward, where it would draw others: the op lacks torch.Tag.nondeterministic_seeded, by which torch "
            f"knows that it must restore the generator. Save it, or turn its dropout off."
        )


def _tag(node: Node, decision: CheckpointPolicy) -> None:
    for one in (node, *(user for user in node.users if is_getitem(user))):
        one.meta[TAG] = decision
        one.meta.pop(REGION_TAG, None)
