"""What each block of a model saves under a budget: shared out once a step with inputs of their shapes was watched.

One pass is one forward of the model. The first with inputs of some shape is surveyed: it saves nothing. When its
blocks were recomputed, the budget is shared out among them by `fastac.budget`, and holds for later passes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fastac import budget, census, linear
from fastac.errors import FastacError
from fastac.policy import BlockPolicies, Policy, policies_in
from fastac.sizes import readable_bytes
from fastac.survey import Survey, together

logger = logging.getLogger("fastac")


Surveys = dict[str, tuple["Share", list[Survey]]]
"""What the regions of each block could save, by the block's name: several of a block that is called several times."""

ATTEMPTS = 8
"""Passes in a row that were surveyed and not recomputed, of which each may still be."""


@dataclasses.dataclass
class _Pass:
    """Passes over inputs of one signature. surveyed: in each of the latest; known: what was shared out, as chosen."""

    surveyed: list[Surveys] = dataclasses.field(default_factory=list)
    known: Surveys = dataclasses.field(default_factory=dict)
    chosen: dict[str, Policy] = dataclasses.field(default_factory=dict)

    def decide(self) -> None:
        """Share out the budgets anew when blocks were recomputed that were not known.

        One that was not is watched on: it has no gradients, or no backward came, or that was broken off.
        """
        reached: Surveys = {}
        for surveys in self.surveyed:
            reached |= {
                block: (share, regions)
                for block, (share, regions) in surveys.items()
                if any(one.reached is not None for one in regions)
            }
        if not reached:
            return
        self.known |= reached
        self.surveyed = []
        for share in dict.fromkeys(share for share, _ in self.known.values()):
            mine = {block: together(regions) for block, (own, regions) in self.known.items() if own == share}
            self.chosen |= share_out(share, mine)


@dataclasses.dataclass(eq=False)
class Budgets:
    """The budgets of one model, and what became of them. Copied and pickled with it.

    watched: whether the model's forward tells when a pass begins. called: the blocks of the pass that runs.
    """

    passes: dict[Any, _Pass] = dataclasses.field(default_factory=dict)
    running: _Pass = dataclasses.field(default_factory=_Pass)
    called: set[str] = dataclasses.field(default_factory=set)
    watched: bool = False

    def before(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The model's forward begins: a hook."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.watched = True
            self._begin(census.signature((args, kwargs)))

    def call(self, block: str, args: Any, kwargs: Any) -> None:
        """A block is called. Where its model's forward is not, one that was called already begins the next pass."""
        if not self.watched and (block in self.called or not self.called):
            self._begin((block, census.signature((args, kwargs))))
        self.called.add(block)

    def forget(self) -> None:
        """The model was changed: what was decided may name modules that are no more."""
        for one in (self.running, *self.passes.values()):
            one.surveyed, one.known, one.chosen = [], {}, {}

    def _begin(self, key: Any) -> None:
        if len(self.passes) >= census.MANY:
            self.passes.clear()
        self.running = self.passes.setdefault(key, _Pass())
        self.running.decide()
        self.running.surveyed = [*filter(None, self.running.surveyed[-ATTEMPTS:]), {}]
        self.called = set()


@dataclasses.dataclass(frozen=True)
class Share(Policy):
    """The budget of one block, by its name, among those of its model."""

    budgets: Budgets = dataclasses.field(default_factory=Budgets, compare=False)
    block: str = dataclasses.field(default="", compare=False)

    def begin_survey(self) -> Survey:
        """A survey of a region of the block in the pass that runs."""
        survey = Survey()
        if torch.is_grad_enabled():  # else nobody enters it, and many would heap up
            surveyed = self.budgets.running.surveyed
            if not surveyed:
                surveyed.append({})
            surveyed[-1].setdefault(self.block, (self, []))[1].append(survey)
        return survey

    def current(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Policy:
        """The policy of the block, which is called now: what was decided, or this, to be surveyed."""
        if not torch.is_grad_enabled():
            return self
        self.budgets.call(self.block, args, kwargs)
        chosen = self.budgets.running.chosen.get(self.block, self)
        if chosen.linear and chosen is not self and linear.was_exchanged(function, chosen):
            logger.info("%s: Linear modules of the model were exchanged, so the budget is shared out anew", self)
            self.budgets.forget()
            return self
        return chosen

    def decided(self) -> Policy | None:
        """What the block saves in passes such as the latest; None before that was shared out."""
        self.budgets.running.decide()
        return self.budgets.running.chosen.get(self.block)


def shared(policies: Policy | BlockPolicies, blocks: Mapping[str, torch.nn.Module]) -> Policy | BlockPolicies:
    """The policies of a model's blocks, with a share for every block that has a budget. `watch` does the rest."""
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


def watch(model: torch.nn.Module, policies: Policy | BlockPolicies) -> None:
    """Let a model's forward tell its budgets, where it has any, when a pass begins."""
    found = {id(policy.budgets): policy.budgets for policy in policies_in(policies) if isinstance(policy, Share)}
    for budgets in found.values():
        model.register_forward_pre_hook(budgets.before, with_kwargs=True)


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


def share_of(policy: Policy, function: Any) -> Share:
    """The share of a block that has a budget. Raises FastacError for a budget that `enable` has not shared out."""
    if not isinstance(policy, Share):
        raise FastacError(
            f"checkpoint(policy={str(policy)!r}) of {census.describe(function)}: a budget is shared out among the "
            f"blocks that fastac.enable finds or is given. Use fastac.enable(model, policy, blocks=...)."
        )
    return policy


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
        sent = sum(communicated.values())
        if sent > limit:
            collectives, sent = "recompute", 0
        choices = budget.choose(outputs, limit - sent)
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
    if choice.linear:
        return Policy("linear_only", collectives=collectives, linear=choice.linear)
    if communicates and collectives == "save":  # these alone
        return Policy("attn_only", max(left_out, default=0) + 1, collectives)
    return Policy("full")


def summary(policies: Collection[Policy]) -> str:
    """What so many blocks save, by what is saved: "attention over at least 513 keys in 30 of 30 blocks, ..."."""
    counts: Counter[str] = Counter()
    for policy in policies:
        if policy.name == "attn_only":
            counts[f"attention over at least {policy.min_kv} keys" if policy.min_kv else "attention"] += 1
        counts.update(policy.linear)
    parts = [f"{what} in {count}" for what, count in counts.most_common()]
    if parts:
        parts[0] += f" of {len(policies)} blocks"
    return ", ".join(parts) or "nothing"


def _tell(budget_policy: Policy, choices: Mapping[str, budget.Choice], policies: Mapping[str, Policy]) -> None:
    held = sum(choice.bytes for choice in choices.values())
    if any(not policy.saves_nothing for policy in policies.values()):
        saved = summary(policies.values())
        logger.info("%s: %s of outputs are saved from now on: %s", budget_policy, readable_bytes(held), saved)
    else:
        logger.warning("%s: nothing is saved: no output of a block is small enough, and recomputed", budget_policy)
