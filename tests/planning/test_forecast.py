"""What is predicted of a step, against the step: bytes to the byte, FLOPs, and what a budget chooses."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastac import subjects
from fastac.errors import FastacError
from fastac.forecast import Forecast
from fastac.models import MODELS
from fastac.policy import Policy
from fastac.simulation import GENERATOR_STATE
from fastac.subjects import subject
from tests import planned, support
from tests.marks import quick, slow
from tests.planned import (
    CAN_BE_SIMULATED,
    CAN_NOT_BE_SIMULATED,
    COGVIDEOX,
    FAMILIES,
    LTX,
    WAN,
    Stack,
    forecast_of,
    plan_of,
    policies_of,
    tiny,
)
from tests.support import AttentionBlock

WITHOUT_LORA = {
    "AllegroTransformer3DModel",
    "Cosmos3OmniTransformer",
    "EasyAnimateTransformer3DModel",
    "Kandinsky5Transformer3DModel",
    "Kandinsky6Transformer3DModel",
    "LatteTransformer3DModel",
    "SanaWMTransformer3DModel",
}
"""Classes that take no adapters, or have none of the Linear modules that diffusers' scripts train."""

WITHOUT_BF16 = {"SanaWMTransformer3DModel"}
"""Classes that do not run in it."""

LESS_AT_THE_PEAK = {"Cosmos3OmniTransformer", "SanaWMTransformer3DModel"}
"""Classes that hold less at the worst moment than predicted, where outputs of Linear modules are saved."""

BF16 = torch.bfloat16


def block_stack(*blocks: torch.nn.Module) -> tuple[Stack, dict[str, Any]]:
    return Stack(*blocks), {name: tensor.detach() for name, tensor in support.stack_inputs().items()}


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Measuring collects garbage often, which need not look at all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Bytes and FLOPs


COMBINATIONS = {
    "fp32": (torch.float32, 0),
    "bf16": (BF16, 0),
    "fp32, LoRA": (torch.float32, 4),
    "bf16, LoRA": (BF16, 4),
}

QUICK = {(WAN, "bf16, LoRA"), (COGVIDEOX, "fp32")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)
        for name in CAN_BE_SIMULATED
        for kind in COMBINATIONS
        if not (name in WITHOUT_LORA and "LoRA" in kind) and not (name in WITHOUT_BF16 and "bf16" in kind)
    ],
)
def test_prediction_is_measurement(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held bytes, peak and FLOPs of every policy, to the last of them.

    Held are the bytes of the allocator, less what it is asked for below all modes without fastac, too. The peak is that
    of what operators return, which no state of a generator is. They return no copies of products that the tape makes:
    where there may be some, the peak is no less than that, and no more than that of the allocator, with the workspaces
    of kernels.
    """
    monkeypatch.setattr("fastac.simulation.GENERATOR_STATE", 0)
    model, inputs = tiny(name, *COMBINATIONS[kind])
    found = Forecast(subject(model, inputs))
    unseen = 0
    wrong = []
    for policy_name, policy in policies_of(found).items():
        plan, mine = plan_of(found, policy), planned.under(model, policy)
        (held, peak), (held_seen, peak_seen) = planned.allocated(mine, inputs), planned.live(mine, inputs)
        states = GENERATOR_STATE * len(found.candidates)
        if policy is None:
            unseen, states = held - held_seen, 0
        if policy is None or not policy.linear:
            is_peak = plan.peak_bytes == peak_seen
        else:
            is_peak = peak_seen <= plan.peak_bytes and (plan.peak_bytes <= peak or name in LESS_AT_THE_PEAK)
        expected = (held - states - unseen, planned.counted_flops(mine, inputs))
        if (plan.held_bytes, plan.flops) != expected or not is_peak:
            wrong.append(f"{policy_name}: {plan} predicted, {expected} measured, peak {peak_seen} to {peak}")
    assert not wrong, "\n".join(wrong)
    assert plan_of(found, Policy()).saved_bytes > 0


@pytest.mark.parametrize("name", quick(CAN_BE_SIMULATED, WAN, LTX, COGVIDEOX))
def test_the_relation_to_full_checkpointing(name: str) -> None:
    found = forecast_of(name)
    none, full, attention = (plan_of(found, policy) for policy in (None, Policy("full"), Policy()))
    assert full.relative == 1
    assert none.relative == none.flops / full.flops < attention.relative < 1
    assert none.recomputed_flops == 0 < attention.recomputed_flops < full.recomputed_flops
    assert full.flops - full.recomputed_flops == none.flops
    assert attention.held_bytes - attention.saved_bytes == full.held_bytes


@pytest.mark.parametrize("name", quick(FAMILIES, WAN, COGVIDEOX))
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
    assert {*CAN_BE_SIMULATED, *CAN_NOT_BE_SIMULATED} == set(MODELS)
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


@pytest.mark.parametrize("lora", [0, *slow(4)])
@pytest.mark.parametrize("name", quick(LONG, LTX))
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
    step = subjects._step

    def counted(subject: Any, lists: Any, *args: Any, **options: Any) -> Any:
        if options.get("backward", True):
            found.append(sum(len(one.simulated) for one in lists))
        return step(subject, lists, *args, **options)

    monkeypatch.setattr(subjects, "_step", counted)
    return found


@pytest.mark.parametrize("name", quick(LONG, WAN))
def test_few_blocks_are_simulated(name: str, simulated_blocks: list[int]) -> None:
    """That it is quick is what it is for: four blocks of each list, once without checkpointing and once with it."""
    found = Forecast(subject(*tiny(name, **LONG[name])))
    counts = [count for option, count in LONG[name].items() if option.startswith("num_")]
    assert len(found.plain.candidates) == len(found.full.candidates) == sum(counts)
    assert simulated_blocks == [4 * len(counts)] * 2


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


@pytest.mark.parametrize("kind", quick(UNLIKE, "one is wider"))
def test_unlike_blocks_are_all_simulated(kind: str) -> None:
    model, inputs = UNLIKE[kind], block_stack()[1]
    found = Forecast(subject(model, inputs, "layers"))
    assert_equal(found, planned.whole(found))
    assert len(found.subject.containers[0].blocks) == len(found.subject.model.layers) == len(model.layers)
    measured = planned.counted_flops(planned.under(model, Policy("full"), blocks="layers"), inputs)
    assert plan_of(found, Policy("full")).flops == measured


@pytest.mark.slow
def test_a_model_that_maps_places_to_other_blocks() -> None:
    config = {"num_layers": 12, "vace_layers": [0, 5, 10]}
    found = Forecast(subject(*tiny("WanVACETransformer3DModel", **config)))
    assert_equal(found, planned.whole(found))
    assert len(found.candidates) == 15


@pytest.mark.slow
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


def test_blocks_before_all_that_is_trained_keep_nothing() -> None:
    """No backward comes to them: what torch would recompute them from is gone with their forward."""
    model, inputs = block_stack(*plain_blocks(4))
    for frozen in (*model.layers[:2], *inputs.values()):
        frozen.requires_grad_(False)
    found = Forecast(subject(model, inputs, "layers"))
    assert [len(outputs) > 0 for outputs in found.outputs().values()] == [False, False, True, True]
    for policy in (Policy("full"), Policy(), Policy(linear=("*",))):
        mine = planned.under(model, policy, blocks="layers")
        plan = plan_of(found, policy)
        held, _ = planned.allocated(mine, inputs)
        assert (plan.held_bytes, plan.flops) == (held, planned.counted_flops(mine, inputs))


# Models


def test_models_without_blocks() -> None:
    with pytest.raises(FastacError, match=r"plan: found no transformer blocks in Linear\. Name them"):
        subject(torch.nn.Linear(2, 2), {"input": torch.randn(1, 2)})


def test_blocks_by_name() -> None:
    model, inputs = block_stack(*plain_blocks(2))
    with pytest.raises(FastacError, match="no such module"):
        subject(model, inputs, "transformer")
    found = Forecast(subject(model, inputs, "layers.1"))
    assert list(found.candidates) == ["layers.1"]
