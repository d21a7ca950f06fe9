"""apply: the passes one after the other, and a look at what came out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch.fx import GraphModule

from fastac.compile import tracing as annotation
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph.functionalization import functionalize, refuse_writes
from fastac.graph.nodes import RECOMPUTED, is_backward, marks, regions
from fastac.graph.rematerialization import rematerialize
from fastac.graph.summary import attention_calls, is_recomputing, summary
from fastac.graph.tagging import Policies, decide, own_policies, saves, tag, where
from fastac.graph.tracing import Traced
from fastac.policy import Policy, resolve, resolve_blocks

logger = logging.getLogger("fastac")

Step = TypeVar("Step", Traced, GraphModule)

AnyPolicy = str | Policy | Mapping[str, str | Policy]


def apply(traced: Step, policy: AnyPolicy | None = None) -> Step:
    """The step with its regions recomputed in the backward, except for what the policy saves. The given one stays.

    traced: what `trace` returned, or a graph of a training step that was traced elsewhere (see docs/graph.md).
    policy: a name, a Policy, or a mapping of block-name patterns to these; None for what each region was checkpointed
    with. Random numbers are drawn in the order of a step without checkpointing.
    Raises PolicyNotAppliedError for a graph without regions or backward and for attention that can not be saved,
    UnsupportedBackendError for a kernel that does not train, FastacError for what else can not be exact.
    """
    if isinstance(traced, Traced):
        if not isinstance(traced.graph_module, GraphModule):
            raise FastacError(
                "apply: this step is compiled. Apply the policy to what fastac.graph.trace returned, and compile that."
            )
        policies = policies_of(traced.graph_module, policy, traced.model)
        graph_module = apply_to_graph(traced.graph_module, policies)
        return dataclasses.replace(traced, graph_module=graph_module, policies=policies)
    if not isinstance(traced, GraphModule):
        raise FastacError(
            f"apply: expected what fastac.graph.trace returned, or a GraphModule, got {type(traced).__name__}: "
            f"fastac.graph.apply(fastac.graph.trace(step, model, ...), policy)"
        )
    return apply_to_graph(traced, policies_of(traced, policy))


def apply_to_graph(graph_module: GraphModule, policies: Policies) -> GraphModule:
    """The same for a graph, with the policy of each region."""
    if is_recomputing(graph_module):
        raise FastacError("apply: this graph was given a policy already. Apply the other one to what was traced.")
    if not any(map(is_backward, graph_module.graph.nodes)):
        raise PolicyNotAppliedError(
            "apply: the graph has no backward in which anything could be recomputed. Compute the gradients in the "
            "step, by torch.autograd.grad, and trace it with fastac.graph.trace."
        )
    for number, nodes in regions(graph_module).items():
        decide(graph_module, nodes, policies[number])  # refuses, before there is work to lose
    functional = tag(functionalize(graph_module), policies)
    after = rematerialize(functional)
    check(after, graph_module, policies)
    logger.info("graph: %s", summary(after, policies))
    return after


def policies_of(
    graph_module: GraphModule, policy: AnyPolicy | None, model: torch.nn.Module | None = None
) -> dict[int, Policy]:
    """The policy of each region. Raises FastacError for a mapping that does not fit the blocks.

    model: the one whose blocks a mapping names; without it, blocks have the names that fastac.enable gave them.
    """
    own = own_policies(graph_module)
    if policy is None:
        return {number: resolve(one) for number, one in own.items()}
    if not isinstance(policy, Mapping):
        return dict.fromkeys(own, resolve(policy))
    found = regions(graph_module)
    names = {module: name for name, module in model.named_modules()} if model is not None else {}
    blocks: dict[str, int] = {}
    of_region: dict[int, str] = {}
    for number, nodes in found.items():
        block = annotation.block_of(number)
        recorded = where(nodes)
        name = names.get(block, "") if block is not None else ""
        of_region[number] = name or recorded.partition(".")[2] or recorded
        blocks.setdefault(of_region[number], number)
    by_number = resolve_blocks(policy, blocks)
    return {number: by_number[blocks[name]] for number, name in of_region.items()}


def check(after: GraphModule, before: GraphModule, policies: Policies) -> GraphModule:
    """Raise PolicyNotAppliedError where attention that is saved is run again, or went; return the graph.

    before: the graph as it was traced. Also raises FastacError where something writes.
    """
    refuse_writes(after)
    now = attention_calls(after)
    lost = set(regions(before)) - set(regions(after))
    if lost:
        raise PolicyNotAppliedError(
            f"{len(lost)} of {len(regions(before))} regions lost the marks on their nodes in a pass, so that nothing "
            f"of them is recomputed. This is not your mistake: torch {torch.__version__} or fastac lost them."
        )
    for number, nodes in regions(before).items():
        policy = policies[number]
        saved = [node for node in nodes if saves(before, node, policy)]
        again = [node.name for node in now.get(number, []) if is_backward(node) and saves(after, node, policy)]
        left = [node.name for node in now.get(number, []) if not is_backward(node) and saves(after, node, policy)]
        if again or len(left) != len(saved):
            raise PolicyNotAppliedError(
                f"{where(nodes)}: {policy} saves {len(saved)} attention calls of this region; the graph has {len(left)}"
                f" of them in the forward and runs {len(again)} again in the backward ({', '.join(again) or 'none'})."
            )
    traced_along = [
        node.name
        for number, nodes in now.items()
        for node in nodes
        if number is not None and is_backward(node) and RECOMPUTED not in marks(node)
    ]
    if traced_along and not all(policy.saves_nothing for policy in policies.values()):
        raise PolicyNotAppliedError(
            f"the backward runs attention of checkpointed regions again ({', '.join(traced_along)}): a "
            f"torch.utils.checkpoint around the block was traced along. Take it off."
        )
    return after
