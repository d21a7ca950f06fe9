"""What is predicted of a step, against the step: bytes to the byte, FLOPs, and what a budget chooses."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac import forecast, hook
from fastac.errors import FastacError
from fastac.events import EXCHANGED
from fastac.forecast import Forecast, subject
from fastac.models import MODELS
from fastac.policy import Policy
from fastac.simulation import GENERATOR_STATE
from fastac.survey import Survey
from tests import planned, support
from tests.planned import CAN_NOT_BE_SIMULATED, CLASSES, FAMILIES, Stack, forecast_of, plan_of, policies_of, tiny
from tests.support import AttentionBlock

BELOW_MODES = {"EasyAnimateTransformer3DModel"}
"""Classes with copies that no mode sees: of a Linear module that is given a view, and adds its bias afterwards."""

WITHOUT_LORA = {"Cosmos3OmniTransformer"}
"""Classes without the Linear modules that diffusers' scripts train."""

BF16 = torch.bfloat16


def block_stack(*blocks: torch.nn.Module) -> tuple[Stack, dict[str, Any]]:
    return Stack(*blocks), {name: tensor.detach() for name, tensor in support.stack_inputs().items()}


# Bytes and FLOPs


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        (torch.float32, 0),
        (BF16, 4),
        pytest.param(BF16, 0, marks=pytest.mark.slow),
        pytest.param(torch.float32, 4, marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16-lora", "bf16", "fp32-lora"],
)
@pytest.mark.parametrize("name", CLASSES)
def test_prediction_is_measurement(name: str, dtype: torch.dtype, lora: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held bytes, peak and FLOPs of every policy, to the last of them."""
    if lora and name in WITHOUT_LORA:
        pytest.skip("no such Linear modules")
    model, inputs = tiny(name, dtype, lora)
    with planned.without_generators(monkeypatch):
        found = Forecast(subject(model, inputs))
        expected = {kind: plan_of(found, policy) for kind, policy in policies_of(found).items()}
    wrong = []
    for kind, policy in policies_of(found).items():
        plan, mine = expected[kind], planned.under(model, policy)
        held, peak = planned.live(mine, inputs)
        if name in BELOW_MODES and policy is not None:
            states = GENERATOR_STATE * sum(1 for _ in found.candidates)
            held, peak = planned.allocated(mine, inputs)[0] - states, plan.peak_bytes
        measured = (held, peak, planned.counted_flops(mine, inputs))
        if (plan.held_bytes, plan.peak_bytes, plan.flops) != measured:
            wrong.append(f"{kind}: {(plan.held_bytes, plan.peak_bytes, plan.flops)} predicted, {measured} measured")
    assert not wrong, "\n".join(wrong)
    assert expected["attn_only"].saved_bytes > 0


@pytest.mark.parametrize("name", CLASSES)
def test_the_relation_to_full_checkpointing(name: str) -> None:
    found = forecast_of(name)
    none, full, attention = (plan_of(found, policy) for policy in (None, Policy("full"), Policy()))
    assert full.relative == 1
    assert none.relative == none.flops / full.flops < attention.relative < 1
    assert none.recomputed_flops == 0 < attention.recomputed_flops < full.recomputed_flops
    assert full.flops - full.recomputed_flops == none.flops
    assert attention.held_bytes - attention.saved_bytes == full.held_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """torch's own full checkpointing counts as that of fastac."""
    model, inputs = tiny(name)
    found = forecast_of(name)
    for policy, plan in ((None, plan_of(found, None)), ("torch", plan_of(found, Policy("full")))):
        mine: Any = copy.deepcopy(model)
        if policy:
            mine.enable_gradient_checkpointing()
        with FlopCounterMode(display=False) as counter:
            planned.step(mine, inputs)
        assert plan.flops == counter.get_total_flops()


@pytest.mark.parametrize("kind", ["full", "attn_only", "linear"])
def test_the_allocator_agrees(kind: str) -> None:
    """To the byte, with the state of the random number generator, which each block keeps until its backward."""
    model, inputs = tiny("WanTransformer3DModel")
    found = forecast_of("WanTransformer3DModel")
    policy = policies_of(found)[kind]
    plan = plan_of(found, policy)
    assert (plan.held_bytes, plan.peak_bytes) == planned.allocated(planned.under(model, policy), inputs)


@pytest.mark.parametrize("name", CAN_NOT_BE_SIMULATED)
def test_what_can_not_be_simulated_is_an_error(name: str) -> None:
    model, inputs = tiny(name)
    found = Forecast(subject(model, inputs))
    with pytest.raises(Exception, match=CAN_NOT_BE_SIMULATED[name]):
        assert found.plain


def test_all_other_classes_can_be_simulated() -> None:
    """What the parameters of the tests above are: one more class that can not be fails there."""
    assert {parameter.values[0] for parameter in CLASSES} | set(CAN_NOT_BE_SIMULATED) == set(MODELS)
    assert len(CAN_NOT_BE_SIMULATED) == 3


# Blocks that are repeated

LONG: dict[str, dict[str, Any]] = {
    "WanTransformer3DModel": {"num_layers": 8},
    "HunyuanVideoTransformer3DModel": {"num_layers": 7, "num_single_layers": 9},
    "LTXVideoTransformer3DModel": {"num_layers": 7},
    "CogVideoXTransformer3DModel": {"num_layers": 7},
    "MochiTransformer3DModel": {"num_layers": 7},
}


def assert_equal(short: Forecast, long: Forecast) -> None:
    """Of every policy, at every moment."""
    for mine, theirs in ((short.plain, long.plain), (short.full, long.full)):
        assert mine.flops == theirs.flops
        assert mine.candidates == theirs.candidates
        assert list(mine.candidates) == list(theirs.candidates)
        assert mine.held() == theirs.held()
    for policy in policies_of(long).values():
        assert plan_of(short, policy) == plan_of(long, policy)
        if policy is not None:
            moments = [
                one.full._deltas(planned.places(one, policy), gradient_shards=2).cumsum() for one in (short, long)
            ]
            assert np.array_equal(*moments)
    everything = sum(one.bytes for candidates in long.candidates.values() for one in candidates)
    for share in (3, 2):
        budget = Policy.budget(everything // share)
        assert short.budgeted(budget) == long.budgeted(budget)
    assert short.every_second_product() == long.every_second_product()


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("name", LONG)
def test_what_is_repeated_is_what_is_simulated_whole(name: str, lora: int) -> None:
    found = Forecast(subject(*tiny(name, lora=lora, **LONG[name])))
    assert not any(one.is_whole for one in found.subject.lists)
    before = {name: list(module._modules) for name, module in found.subject.model.named_modules()}
    assert_equal(found, planned.whole(found))
    assert {name: list(module._modules) for name, module in found.subject.model.named_modules()} == before


@pytest.fixture
def simulated_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each simulation of a whole step had."""
    found: list[int] = []
    step = forecast._step

    def counted(subject: Any, lists: Any, *args: Any, **options: Any) -> Any:
        if options.get("backward", True):
            found.append(sum(len(one.simulated) for one in lists))
        return step(subject, lists, *args, **options)

    monkeypatch.setattr(forecast, "_step", counted)
    return found


def test_few_blocks_are_simulated(simulated_blocks: list[int]) -> None:
    """That it is quick is what it is for."""
    found = Forecast(subject(*tiny("HunyuanVideoTransformer3DModel", **LONG["HunyuanVideoTransformer3DModel"])))
    assert len(found.plain.candidates) == len(found.full.candidates) == 16
    assert simulated_blocks == [8, 8]


class Doubled(AttentionBlock):
    """Does something more than others do."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return super().forward(video, text).exp()


class Frozen(AttentionBlock):
    """Is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn[2].bias.requires_grad_(False)


class ByPlace(Stack):
    """Gives every third block a longer text."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.layers):
            video = block(video, text.repeat(1, 2, 1) if place % 3 == 0 else text)
        return video


class Between(Stack):
    """Does something after every fifth block."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.layers):
            video = block(video, text)
            if place % 5 == 4:
                video = video @ torch.ones(16, 16)
        return video


class ByName(Stack):
    """Takes its blocks by their names, of which none may be missing."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for place in range(7):
            video = self.layers.get_submodule(str(place))(video, text)
        return video


def plain_blocks(count: int = 7) -> list[torch.nn.Module]:
    return [AttentionBlock() for _ in range(count)]


UNLIKE = {
    "one is wider": Stack(*plain_blocks(3), planned.wide_block(), *plain_blocks(3)),
    "alternating": Stack(*(planned.wide_block() if place % 2 else AttentionBlock() for place in range(7))),
    "one of another class": Stack(*plain_blocks(3), Doubled(), *plain_blocks(3)),
    "one has less that is trained": Stack(*plain_blocks(4), Frozen(), *plain_blocks(4)),
    "by place": ByPlace(*plain_blocks(9)),
    "between": Between(*plain_blocks(12)),
    "by name": ByName(*plain_blocks()),
    "two halves": Stack(*plain_blocks(4), *(planned.wide_block() for _ in range(4))),
}


@pytest.mark.parametrize("model", UNLIKE.values(), ids=UNLIKE)
def test_unlike_blocks_are_all_simulated(model: Stack) -> None:
    inputs = block_stack()[1]
    found = Forecast(subject(model, inputs, "layers"))
    assert_equal(found, planned.whole(found))
    assert len(found.subject.containers[0].blocks) == len(found.subject.model.layers) == len(model.layers)
    measured = planned.counted_flops(planned.under(model, Policy("full"), blocks="layers"), inputs)
    assert plan_of(found, Policy("full")).flops == measured


def test_a_model_that_maps_places_to_other_blocks() -> None:
    config = {"num_layers": 12, "vace_layers": [0, 5, 10]}
    found = Forecast(subject(*tiny("WanVACETransformer3DModel", **config)))
    assert_equal(found, planned.whole(found))
    assert len(found.candidates) == 15


def test_a_block_that_is_called_twice() -> None:
    class Twice(Stack):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            for block in (*self.layers, self.layers[1]):
                video = block(video, text)
            return video

    model, (_, inputs) = Twice(*plain_blocks()), block_stack()
    found = Forecast(subject(model, inputs, "layers"))
    assert_equal(found, planned.whole(found))
    assert list(found.candidates)[-1] == "layers.1#2"
    assert len(found.outputs()["layers.1"]) == 2 * len(found.outputs()["layers.0"])
    for policy in (Policy("full"), Policy(), Policy(linear=("*",))):
        mine = planned.under(model, policy, blocks="layers")
        plan = plan_of(found, policy)
        held, _ = planned.live(mine, inputs)
        assert (plan.held_bytes - 8 * GENERATOR_STATE, plan.flops) == (held, planned.counted_flops(mine, inputs))


# Budgets


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_chooses_what_training_chooses(name: str, per_block: bool) -> None:
    model, inputs = tiny(name)
    found = forecast_of(name)
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


@pytest.mark.parametrize("name", CLASSES)
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


@pytest.mark.parametrize("name", CLASSES)
def test_a_budget_is_never_worse_than_a_policy(name: str) -> None:
    """With a limit of what a policy saves, no more is run again, and no more is saved."""
    found = forecast_of(name)
    policies = {kind: planned.places(found, policy) for kind, policy in policies_of(found).items() if policy}
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


# Models


def test_models_without_blocks() -> None:
    with pytest.raises(FastacError, match="plan: found no transformer blocks in Linear. Name them"):
        subject(torch.nn.Linear(2, 2), {"input": torch.randn(1, 2)})


def test_blocks_by_name() -> None:
    model, inputs = block_stack(*plain_blocks(2))
    with pytest.raises(FastacError, match="no such module"):
        subject(model, inputs, "transformer")
    found = Forecast(subject(model, inputs, "layers.1"))
    assert list(found.candidates) == ["layers.1"]
