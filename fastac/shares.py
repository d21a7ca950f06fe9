"""What each block of a model saves under a budget: shared out once a step with inputs of their shapes was watched.

One pass is one run through the blocks. The first with inputs of some shape is surveyed: it saves nothing. When its
blocks were all recomputed, the budget is shared out among them by `fastac.budget`, and holds for later passes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fastac import budget, census
from fastac.errors import FastacError
from fastac.policy import BlockPolicies, Policy
from fastac.sizes import readable_bytes
from fastac.survey import Survey

logger = logging.getLogger("fastac")


@dataclasses.dataclass
class _Pass:
    """Passes whose first block gets inputs of one signature. surveys, chosen: by the names of blocks."""

    surveys: dict[str, tuple[Share, Survey]] = dataclasses.field(default_factory=dict)
    chosen: dict[str, Policy] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Budgets:
    """The budgets of one model, and what became of them. Copied and pickled with it."""

    passes: dict[Any, _Pass] = dataclasses.field(default_factory=dict)
    running: _Pass = dataclasses.field(default_factory=_Pass)
    called: set[str] = dataclasses.field(default_factory=set)

    def call(self, block: str, args: Sequence[Any]) -> None:
        """A block is called. One that was called already in this pass begins the next."""
        if block in self.called or not self.called:
            if len(self.passes) >= census.MANY:
                self.passes.clear()
            self.running = self.passes.setdefault((block, census.signature(tuple(args))), _Pass())
            self.called = set()
        self.called.add(block)


@dataclasses.dataclass(frozen=True)
class Share(Policy):
    """The budget of one block, by its name, among those of its model."""

    budgets: Budgets = dataclasses.field(default_factory=Budgets, compare=False)
    block: str = dataclasses.field(default="", compare=False)

    def begin_survey(self) -> Survey:
        """A survey of the block's region in the pass that runs."""
        survey = Survey()
        self.budgets.running.surveys[self.block] = self, survey
        return survey

    def decided(self) -> Policy | None:
        """What the block saves in passes such as the latest; None before that was shared out."""
        running = self.budgets.running
        mine = running.surveys.get(self.block)
        if self.block not in running.chosen and mine is not None and mine[0] == self:
            surveys = {block: survey for block, (share, survey) in running.surveys.items() if share == self}
            if all(survey.reached is not None for survey in surveys.values()):
                running.chosen.update(share_out(self, surveys))
        return running.chosen.get(self.block)


def shared(policies: Policy | BlockPolicies, blocks: Mapping[str, torch.nn.Module]) -> Policy | BlockPolicies:
    """The policies of a model's blocks, with a share for every block that has a budget."""
    if isinstance(policies, Policy):
        if not policies.is_budget:
            return policies
        policies = BlockPolicies({getattr(block, "_orig_mod", block): policies for block in blocks.values()})
    budgets = Budgets()
    for name, block in blocks.items():
        policy = policies[getattr(block, "_orig_mod", block)]
        if policy.is_budget:
            policies[getattr(block, "_orig_mod", block)] = Share(**_given(policy), budgets=budgets, block=name)
    return policies


def decided(policy: Policy) -> Policy | None:
    """What became of a block's share of a budget; None for other policies, and before it was shared out."""
    return policy.decided() if isinstance(policy, Share) else None


def as_given(policy: Policy) -> Policy:
    """A policy as `enable` takes it: in the place of a share, what was decided, or the budget it came from."""
    if not isinstance(policy, Share):
        return policy
    return policy.decided() or Policy(**_given(policy))


def _given(policy: Policy) -> dict[str, Any]:
    return {field.name: getattr(policy, field.name) for field in dataclasses.fields(Policy)}


def current(policy: Policy, function: Any, args: Sequence[Any]) -> Policy:
    """The policy of a block that has a budget and is called now: what was decided, or its share, to be surveyed.

    Raises FastacError for a budget that `enable` has not shared out.
    """
    if not isinstance(policy, Share):
        raise FastacError(
            f"checkpoint(policy={str(policy)!r}) of {census.describe(function)}: a budget is shared out among the "
            f"blocks that fastac.enable finds or is given. Use fastac.enable(model, policy, blocks=...)."
        )
    if not torch.is_grad_enabled():
        return policy
    policy.budgets.call(policy.block, args)
    return policy.decided() or policy


def share_out(budget_policy: Policy, surveys: Mapping[str, Survey]) -> dict[str, Policy]:
    """What every block saves under a budget, by its name."""
    limit, collectives = budget_policy.limit or 0, budget_policy.collectives
    outputs = {name: survey.outputs for name, survey in surveys.items()}
    communicated = {name: survey.communicated for name, survey in surveys.items()}
    choices: dict[str, budget.Choice] = {}
    if budget_policy.per_block:
        if max(communicated.values(), default=0) > limit:
            collectives, communicated = "recompute", dict.fromkeys(communicated, 0)
        for name, found in outputs.items():
            choices |= budget.choose({name: found}, limit - communicated[name])
    else:
        together = sum(communicated.values())
        if together > limit:
            collectives, together = "recompute", 0
        choices = budget.choose(outputs, limit - together)
    policies = {
        name: policy_of(choice, outputs[name], collectives, bool(surveys[name].communicated))
        for name, choice in choices.items()
    }
    _tell(budget_policy, choices, policies)
    return policies


def policy_of(
    choice: budget.Choice, outputs: Sequence[budget.Output], collectives: str = "save", communicates: bool = False
) -> Policy:
    """The policy that saves what was chosen among the outputs of a block."""
    left_out = [one.keys for one in outputs if one.keys and (choice.min_kv is None or one.keys < choice.min_kv)]
    if choice.min_kv is not None:
        min_kv = max(left_out) + 1 if left_out else 0
        return Policy("attn_only", min_kv, collectives, choice.linear)
    if choice.linear or (communicates and collectives == "save"):
        return Policy("linear_only", collectives=collectives, linear=choice.linear)
    return Policy("full")


def summary(policies: Collection[Policy]) -> str:
    """What so many blocks save, by what is saved: "attention over 513 keys and more in 30 of 30 blocks, ..."."""
    counts: Counter[str] = Counter()
    for policy in policies:
        if policy.name == "attn_only":
            counts[f"attention over {policy.min_kv} keys and more" if policy.min_kv else "attention"] += 1
        counts.update(policy.linear)
    parts = [f"{what} in {count}" for what, count in counts.most_common()]
    if parts:
        parts[0] += f" of {len(policies)} blocks"
    return ", ".join(parts) or "nothing"


def _tell(budget_policy: Policy, choices: Mapping[str, budget.Choice], policies: Mapping[str, Policy]) -> None:
    held = sum(choice.bytes for choice in choices.values())
    if held:
        saved = summary(policies.values())
        logger.info("%s: %s are saved from the next step on: %s", budget_policy, readable_bytes(held), saved)
    else:
        logger.warning("%s: no output of a block is small enough, so nothing is saved", budget_policy)
