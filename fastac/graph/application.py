"""apply: a policy on a traced step, and a check of the result. compile: the result through inductor."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from fastac.compiled.tracing import REGION
from fastac.engine import releases
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph.nodes import REPEATS, arguments_of, is_backward, marks, regions
from fastac.graph.passes import Policies, functionalize, own_policies, refuse_writes, rematerialize, tag, where
from fastac.graph.tracing import Traced, summary
from fastac.policy import AnyPolicy, Policy, resolve, resolve_blocks
from fastac.registry import classify

logger = logging.getLogger("fastac")

Step = TypeVar("Step", Traced, GraphModule)

# inductor takes a graph that was traced with its backward for inference. It turns the first pass off in training, where
# it cost memory (pytorch 101423); the second is on everywhere (134874).
KEEP_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Options of inductor: both passes move recomputed operators into the forward, to others that share their inputs."""


def apply(traced: Step, policy: AnyPolicy | None = None) -> Step:
    """Recompute the regions of a step in its backward, except for what the policy saves.

    Random numbers are drawn in the order of a step without checkpointing.

    Args:
        traced: a step from `trace`, or the graph of a training step from another tracer. It is not changed.
        policy: a name, a Policy, or a mapping of block-name patterns to names or policies (first match counts); None
            for the policy that each region was checkpointed with.

    Returns:
        Another step, or graph, of the same kind as `traced`.

    Raises:
        PolicyNotAppliedError: a graph without regions or backward, or attention that cannot be saved.
        UnsupportedBackendError: a kernel that does not train.
        FastacError: another reason why the result would not be exact; a step that has a policy already.

    Example:
        >>> train = fastac.graph.apply(traced, "attn_only")
        >>> loss, gradients = train(**inputs)
    """
    releases.need_traces()
    graph_module = traced.graph_module if isinstance(traced, Traced) else traced
    policies = _policies_of(graph_module, policy)
    if any(REPEATS in marks(node) for node in graph_module.graph.nodes):
        raise FastacError("apply: this graph has a policy already. Apply the other policy to the step from trace.")
    if not any(map(is_backward, graph_module.graph.nodes)):
        raise PolicyNotAppliedError(
            "apply: the graph has no backward that could recompute anything. Compute the gradients in the step, by "
            "torch.autograd.grad, and trace it with fastac.graph.trace."
        )
    # In this order: in-place operators would hide from `tag` what an operator reads, and `rematerialize` removes the
    # tags, by which torch's own passes would recompute once more.
    result = rematerialize(tag(functionalize(graph_module), policies))
    _check(result, graph_module, policies)
    logger.info("graph: %s", summary(result, policies))
    return dataclasses.replace(traced, graph_module=result, policies=policies) if isinstance(traced, Traced) else result


def compile(traced: Traced, **options: Any) -> Traced:  # noqa: A001
    """The same step through inductor, which compiles it at its first call.

    Results are equal up to rounding, and dropout is inductor's own. Two passes that would move the recomputation back
    to the forward are off. Do not use a pass of your own that merges equal operators: it would undo the recomputation.

    Args:
        traced: a step that `apply` returned.
        options: options of inductor, by their names in torch._inductor.config, for instance max_autotune=True.

    Returns:
        Another step.

    Example:
        >>> compiled = fastac.graph.compile(fastac.graph.apply(traced, "attn_only"))
    """
    # dynamic=False: sizes are constants of the trace, so calls with others are refused before they come here.
    compiled = torch.compile(traced.graph_module, fullgraph=True, dynamic=False, options={**KEEP_ORDER, **options})
    return dataclasses.replace(traced, compiled=compiled)


def _policies_of(graph_module: GraphModule, policy: AnyPolicy | None) -> dict[int, Policy]:
    """The policy of each region. Patterns of a mapping match the name of a block, without the class of its model."""
    checkpointed_with = own_policies(graph_module)
    if policy is None:
        return {number: resolve(region_policy) for number, region_policy in checkpointed_with.items()}
    if not isinstance(policy, Mapping):
        return dict.fromkeys(checkpointed_with, resolve(policy))
    recorded = {number: where(nodes) for number, nodes in regions(graph_module).items()}
    # "WanTransformer3DModel.blocks.0" -> "blocks.0". A function that is not a block has no dot.
    names = {number: name.partition(".")[2] or name for number, name in recorded.items()}
    by_name = resolve_blocks(policy, {name: name for name in names.values()})
    return {number: by_name[name] for number, name in names.items()}


def _check(result: GraphModule, traced: GraphModule, policies: Policies) -> None:
    """Raise if an attention call that is saved is missing in the forward or runs in the backward.

    This does not rely on the tags. A region number that only the backward has is the recompute of a
    torch.utils.checkpoint around a region, which was traced too.
    """
    refuse_writes(result)
    expected, calls = _saved_calls(traced, policies), _saved_calls(result, policies)
    recomputed = [node.name for node in calls if is_backward(node)]
    if recomputed or len(calls) != len(expected):
        names = ", ".join(map(str, dict.fromkeys(policies.values())))
        raise PolicyNotAppliedError(
            f"{names}: {len(expected)} attention calls were to be saved; the graph has {len(calls) - len(recomputed)} "
            f"in the forward and runs {len(recomputed)} in the backward ({', '.join(recomputed) or 'none'}). A "
            f"torch.utils.checkpoint around a block was traced too (remove it), or a pass lost marks."
        )


def _saved_calls(graph_module: GraphModule, policies: Policies) -> list[Node]:
    """Attention calls in regions that the policy of the region saves, or if it has none, that any policy saves."""
    saved = []
    for node in graph_module.graph.nodes:
        bound, number = classify(node.target), marks(node).get(REGION)
        if bound is not None and bound.is_attention and number is not None:
            keys = bound.keys(*arguments_of(graph_module, node))
            # A torch.utils.checkpoint around a region gives its recompute a number of its own, without a policy.
            if any(policy.saves(keys) for policy in ([policies[number]] if number in policies else policies.values())):
                saved.append(node)
    return saved
