"""What a plan chooses under a budget: what training chooses, and never worse than a named policy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import fastac
from fastac import hook
from fastac.events import EXCHANGED
from fastac.policy import NAMED, Policy
from fastac.survey import Survey
from tests import planned
from tests.marks import quick, slow
from tests.planned import (
    CAN_BE_SIMULATED,
    COGVIDEOX,
    FAMILIES,
    HUNYUAN_VIDEO,
    LTX,
    WAN,
    forecast_of,
    policies_of,
    tiny,
)


@pytest.mark.parametrize("per_block", [False, True], ids=["together", "per block"])
@pytest.mark.parametrize("lora", [0, *slow(4)])
@pytest.mark.parametrize("name", quick(FAMILIES, WAN, COGVIDEOX))
def test_a_plan_chooses_what_training_chooses(name: str, lora: int, per_block: bool) -> None:
    """For budgets of which each leads to another choice."""
    model, inputs = tiny(name, lora=lora)
    found = forecast_of(name, lora=lora)
    everything = sum(one.bytes for outputs in found.outputs().values() for one in outputs)
    parts = len(found.outputs()) if per_block else 1
    chosen = []
    for share in (0.04, 0.3, 0.8, 1.0):
        limit = int(share * everything / parts)
        budget = Policy.budget(per_block=limit) if per_block else Policy.budget(limit)
        mine = planned.under(model, budget)
        for _ in range(2):
            planned.step(mine, inputs)
        setting = hook.setting_of(mine)
        assert setting is not None
        chosen.append(found.budgeted(budget))
        assert chosen[-1] == hook.policy_as_given(mine, setting)
    assert all(one != other for one, other in itertools.pairwise(chosen)), "every budget is another choice"


@pytest.mark.parametrize("name", quick(CAN_BE_SIMULATED, WAN, LTX, COGVIDEOX))
def test_candidates_are_what_a_survey_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, bytes, FLOPs and keys of every output, in their order."""
    model, inputs = tiny(name)
    surveys: dict[str, list[Survey]] = {}
    begin = fastac.shares.Share.begin_survey

    def noted(share: Any) -> Survey:
        surveys.setdefault(share.block, []).append(begin(share))
        return surveys[share.block][-1]

    monkeypatch.setattr(fastac.shares.Share, "begin_survey", noted)
    planned.step(planned.under(model, Policy.budget(10**9)), inputs)
    surveyed = {block: [one for survey in mine for one in survey.outputs] for block, mine in surveys.items()}
    assert surveyed == forecast_of(name).outputs()


@pytest.mark.parametrize("name", quick(CAN_BE_SIMULATED, WAN, LTX, COGVIDEOX, HUNYUAN_VIDEO))
def test_a_budget_is_never_worse_than_a_policy(name: str) -> None:
    """With a limit of what a policy saves, no more is run again, and no more is saved."""
    found = forecast_of(name)
    policies = {kind: planned.places(found, policy) for kind, policy in policies_of(found).items() if policy}
    policies["long_attn_only"] = planned.places(found, NAMED["long_attn_only"])
    policies["ops"] = [
        place for place in found.every_second_product() if found.candidates[place[0]][place[1]].name != ""
    ]
    for kind, saved in policies.items():
        fixed = found.plan(kind, saved)
        chosen = found.budgeted(Policy.budget(fixed.saved_bytes))
        plan = found.plan("budget", found.of_policies(chosen))
        assert plan.recomputed_flops <= fixed.recomputed_flops, kind
        assert plan.saved_bytes <= fixed.saved_bytes, kind
    everything = found.plan("", planned.places(found, Policy(linear=("*",))))
    plans = [
        found.plan("", found.of_policies(found.budgeted(Policy.budget(everything.saved_bytes * share // 19))))
        for share in range(20)
    ]
    for share, (plan, more) in enumerate(itertools.pairwise(plans)):
        assert plan.saved_bytes <= everything.saved_bytes * share // 19
        assert more.recomputed_flops <= plan.recomputed_flops
    assert plans[-1].recomputed_flops == everything.recomputed_flops < plans[0].recomputed_flops


def test_what_torchtitan_saves() -> None:
    """Attention, and of the matrix products of a block the first, the third, ..."""
    found = forecast_of("WanTransformer3DModel")
    for block, candidates in found.candidates.items():
        products = [place for place, one in enumerate(candidates) if not one.keys]
        attention = [place for place, one in enumerate(candidates) if one.keys]
        assert len(products) == 10
        assert len(attention) == 2
        saved = [place for mine, place in found.every_second_product() if mine == block]
        assert saved == sorted(attention + products[::2])
        assert not any(one.name == EXCHANGED for one in candidates)
