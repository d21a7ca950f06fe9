"""apply: a policy on a traced step, and a check of what came out. compile: the result through inductor."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from fastac.compile import tracing as annotation
from fastac.engine import releases
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph.nodes import RECOMPUTED, call, is_attention, is_backward, marks, regions
from fastac.graph.passes import Policies, functionalize, own_policies, refuse_writes, rematerialize, tag, where
from fastac.graph.tracing import Traced, summary
from fastac.policy import Policy, resolve, resolve_blocks
from fastac.registry import classify

logger = logging.getLogger("fastac")

Step = TypeVar("Step", Traced, GraphModule)

AnyPolicy = str | Policy | Mapping[str, str | Policy]

KEEP_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Options of inductor: both passes move recomputed operators to where the forward has others with their inputs."""


def apply(traced: Step, policy: AnyPolicy | None = None) -> Step:
    """Recompute the regions of a step in its backward, except for what the policy saves.

    Random numbers are drawn in the order of a step without checkpointing.

    Args:
        traced: what `trace` returned, or the graph of a training step that was traced elsewhere. It stays as it is.
        policy: a name, a Policy, or a mapping of block-name patterns to these (first match counts); None for what each
            region was checkpointed with.

    Returns:
        Another step, or graph, of the same kind as `traced`.

    Raises:
        PolicyNotAppliedError: a graph without regions or backward, or attention that cannot be saved.
        UnsupportedBackendError: a kernel that does not train.
        FastacError: what else cannot be exact; a step that has a policy already.

    Example:
        >>> train = fastac.graph.apply(traced, "attn_only")
        >>> loss, gradients = train(**inputs)
    """
    releases.need_traces()
    if isinstance(traced, Traced):
        policies = _policies_of(traced.graph_module, policy, traced.model)
        graph_module = _apply_to_graph(traced.graph_module, policies)
        return dataclasses.replace(traced, graph_module=graph_module, policies=policies)
    return _apply_to_graph(traced, _policies_of(traced, policy))


def compile(traced: Traced, **options: Any) -> Traced:  # noqa: A001
    """The same step through inductor, which compiles it at its first call.

    Results are equal up to rounding, and dropout is inductor's own. Two passes that would move the recomputation back
    to the forward are off; a pass of your own that merges equal operators would undo it as well.

    Args:
        traced: what `apply` returned.
        options: of inductor, by their names in torch._inductor.config, such as max_autotune=True.

    Returns:
        Another step.

    Example:
        >>> compiled = fastac.graph.compile(fastac.graph.apply(traced, "attn_only"))
    """
    compiled = torch.compile(traced.graph_module, fullgraph=True, dynamic=False, options={**KEEP_ORDER, **options})
    return dataclasses.replace(traced, compiled=compiled)


def _apply_to_graph(graph_module: GraphModule, policies: Policies) -> GraphModule:
    if any(RECOMPUTED in marks(node) for node in graph_module.graph.nodes):
        raise FastacError("apply: this graph was given a policy already. Apply the other one to what was traced.")
    if not any(map(is_backward, graph_module.graph.nodes)):
        raise PolicyNotAppliedError(
            "apply: the graph has no backward in which anything could be recomputed. Compute the gradients in the "
            "step, by torch.autograd.grad, and trace it with fastac.graph.trace."
        )
    after = rematerialize(tag(functionalize(graph_module), policies))
    _check(after, graph_module, policies)
    logger.info("graph: %s", summary(after, policies))
    return after


def _policies_of(
    graph_module: GraphModule, policy: AnyPolicy | None, model: torch.nn.Module | None = None
) -> dict[int, Policy]:
    """The policy of each region. model: whose blocks a mapping names; without it they have the names of `enable`."""
    own = own_policies(graph_module)
    if policy is None:
        return {number: resolve(one) for number, one in own.items()}
    if not isinstance(policy, Mapping):
        return dict.fromkeys(own, resolve(policy))
    names = {module: name for name, module in model.named_modules()} if model is not None else {}
    first: dict[str, int] = {}
    of_region: dict[int, str] = {}
    for number, nodes in regions(graph_module).items():
        block = annotation.block_of(number)
        recorded = where(nodes)
        name = names.get(block, "") if block is not None else ""
        of_region[number] = name or recorded.partition(".")[2] or recorded
        first.setdefault(of_region[number], number)
    by_number = resolve_blocks(policy, first)
    return {number: by_number[first[name]] for number, name in of_region.items()}


def _check(after: GraphModule, before: GraphModule, policies: Policies) -> None:
    """Raise where an attention call that is saved is missing in the forward or runs in the backward.

    It does not rely on the tags. A region number that only the backward has is the recompute of a
    torch.utils.checkpoint around a region, traced along.
    """
    refuse_writes(after)
    expected, found = _saved_calls(before, policies), _saved_calls(after, policies)
    again = [node.name for node in found if is_backward(node)]
    if again or len(found) != len(expected):
        names = ", ".join(map(str, dict.fromkeys(policies.values())))
        raise PolicyNotAppliedError(
            f"{names}: {len(expected)} attention calls were to be saved; the graph has {len(found) - len(again)} of "
            f"them in the forward and runs {len(again)} in the backward ({', '.join(again) or 'none'}). A "
            f"torch.utils.checkpoint around a block was traced along (take it off), or a pass lost marks."
        )


def _saved_calls(graph_module: GraphModule, policies: Policies) -> list[Node]:
    """Attention calls of regions that their policy saves; in a region without a policy, that any policy saves."""
    saved = []
    for node in graph_module.graph.nodes:
        number: int | None = marks(node).get(annotation.REGION)
        resolved = classify(node.target) if is_attention(node) else None
        if resolved is not None and number is not None:
            keys = resolved.keys(*call(graph_module, node))
            possible = [policies[number]] if number in policies else policies.values()
            if any(policy.saves(keys) for policy in possible):
                saved.append(node)
    return saved
