"""What a plan says of offload: which bytes wait in host memory, from when to when, and how fast copies must be."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from fastac.engine import offload
from fastac.models import published as configurations
from fastac.models.published import with_layers
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.timeline import Candidate, Event, HeldStorage, Moment, Timeline
from fastac.planning.video import without_weights
from fastac.policy import Policy
from tests.engine.simulated import simulated
from tests.live_bytes import LiveBytes
from tests.marks import quick, soak
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, tiny

OFFLOAD = Policy(offload=True)


# Soak: what plans of LTX and CogVideoX predict, plans of Wan and test_forecast see as well.
@pytest.mark.parametrize(
    "name", [*quick([WAN, HUNYUAN_VIDEO], WAN), *soak(LTX, COGVIDEOX, "LTX2VideoTransformer3DModel")]
)
def test_prediction_is_measurement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes on the device, in the forward's end and at the worst moment, and of those on the host."""
    monkeypatch.setattr("fastac.planning.simulation.GENERATOR_STATE", 0)
    model, inputs = tiny(name, num_layers=5)
    found = Forecast(fake_model(model, inputs))
    stays = {f"blocks.{number}": Policy("attn_only", offload=number < 2, keep=1 + number // 2) for number in range(5)}
    for policy in (
        *[stays] * (name == WAN),
        Policy("full", offload=True),
        OFFLOAD,
        Policy(offload="attention"),
        Policy(offload="inputs", keep=3),
    ):
        mine = planned.under(model, policy)
        with simulated(late=False) as device:
            plan = found.plan(policy)
            planned.step(mine, inputs)  # what is built once is built now
            with LiveBytes(planned.clear(mine, inputs)) as meter:
                outputs = mine(**inputs)
                held, host = meter.now, device.in_use
            del outputs
            with LiveBytes(planned.clear(mine, inputs)) as meter:
                planned.step(mine, inputs)
        assert (plan.held_bytes, plan.host_bytes) == (held, host), policy
        assert plan.peak_bytes - found.states.total == meter.peak, policy
        assert host > 0


def test_what_stays_and_what_copies_have_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of four calls, of which two stay, by hand: FLOPs of each forward 100, recompute 100, backward 50."""
    monkeypatch.setattr(offload, "SMALLEST", 10)
    names = ["a", "b", "c", "d"]
    begins = {
        name: [Moment(number, 100 * number), Moment(8 - number, 400 + 150 * (3 - number))]
        for number, name in enumerate(names)
    }
    kept = [
        HeldStorage(10, ["a"]),
        HeldStorage(9, ["a"]),  # small
        HeldStorage(1000, ["a", "b"]),  # of more than one
        HeldStorage(20, ["b"], ("a", 0)),  # leaves with the later one
        HeldStorage(2000, ["c"], ("b", 0)),  # one of those that stay
        HeldStorage(300, [], ("b", 0)),
        HeldStorage(4000, [], ("b", 1)),  # not saved
    ]
    candidates = {name: [Candidate("attention", flops=90, keys=2), Candidate("attention", keys=1)] for name in names}
    events = [Event(0) for _ in range(9)]
    events[0].bytes = 10_000
    step = Timeline(events, 5, Counter(forward=400), candidates, begins, kept)
    stay = dict.fromkeys(names, Policy(min_kv=2))
    assert (step.held(stay), step.peak(stay)) == (10_000, 10_000)
    policies = dict.fromkeys(names, Policy(min_kv=2, offload=True))
    first, second = step.host_copies(policies)
    assert (first.bytes, first.left.event, first.returns.event) == (10, 3, 7)
    assert (second.bytes, second.left.event, second.returns.event) == (320, 4, 6)
    assert step.held(policies) == 10_000 - 330
    assert step.bytes_per_flop(policies) == 320 / (150 - 90), "while it comes back, beside a replayed attention"
    policies["b"] = Policy(min_kv=2, offload="attention")
    assert [one.bytes for one in step.host_copies(policies)] == [10, 300], "what is on the device anyway"


def test_wan_14b_holds_less_than_full_checkpointing_and_runs_less_again() -> None:
    """On 75,600 tokens, with 6 of its 40 blocks."""
    wan = configurations.load_configuration("wan2.1-t2v-14b")
    wan = dataclasses.replace(wan, config=with_layers(wan.config, 6))
    video = dataclasses.replace(wan.default, frames=81, height=720, width=1280)
    found = Forecast(fake_model(without_weights(wan, video.dtype, lora=32), wan.inputs(video)))
    full, best = found.plan("full"), found.plan(ROWS["long_attn_only, offload"])
    assert best.held_bytes < full.held_bytes
    assert best.peak_bytes < full.peak_bytes
    assert best.relative < 0.84
    assert best.bytes_per_flop * 400e12 < 6e9, "PCIe 4 x16 has 25e9"
