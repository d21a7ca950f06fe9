"""What a plan says of offload: which bytes wait in host memory, from when to when, and how fast copies must be."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from fastac.engine import offload
from fastac.models import published as configurations
from fastac.models.published import with_layers
from fastac.planning.forecast import Forecast
from fastac.planning.plans import ROWS
from fastac.planning.subject import subject
from fastac.planning.timeline import Candidate, Event, Kept, Moment, Timeline
from fastac.planning.video import without_weights
from fastac.policy import NAMED, Policy
from tests.engine.simulated import simulated
from tests.live_bytes import LiveBytes
from tests.marks import quick
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, stack_inputs, tiny
from tests.support import VIDEO_TOKENS, WIDTH, stack

LAYERS = 6
VIDEO = VIDEO_TOKENS * WIDTH * 4
"""Bytes of what a block is called with, but for the text, which all blocks are; the first has what the model has."""
OUTPUTS, STATISTICS = 2 * VIDEO, 2 * (VIDEO_TOKENS * 2 * 4)
"""Bytes that a block saves of its two attention calls of two heads."""

Leaves = dict[int, tuple[int, int, int]]
"""Region -> the bytes that leave with it, the region at whose forward they have left (LAYERS: at the end), and the one
with whose recompute they return."""


def of_all(first: int, size: int, keep: int = 2) -> Leaves:
    """What leaves where all blocks offload the same."""
    return {number: (size if number else first, number + keep + 1, number + 1) for number in range(LAYERS - keep)}


OFFLOAD = Policy(offload=True)
CASES: dict[str, tuple[Sequence[Policy], int, Leaves]] = {
    "full": ([Policy("full", offload=True)] * LAYERS, 0, of_all(0, VIDEO)),
    "attn_only": ([OFFLOAD] * LAYERS, 0, of_all(OUTPUTS + STATISTICS, VIDEO + OUTPUTS + STATISTICS)),
    "statistics are small": ([OFFLOAD] * LAYERS, STATISTICS // 2 + 1, of_all(OUTPUTS, VIDEO + OUTPUTS)),
    "outputs": ([Policy(offload="attention")] * LAYERS, 0, of_all(OUTPUTS + STATISTICS, OUTPUTS + STATISTICS)),
    "inputs": ([Policy(offload="inputs")] * LAYERS, 0, of_all(0, VIDEO)),
    "more stay": ([Policy("full", offload=True, keep=3)] * LAYERS, 0, of_all(0, VIDEO, 3)),
    "some blocks": (
        [OFFLOAD, NAMED["attn_only"], OFFLOAD, NAMED["full"], OFFLOAD, OFFLOAD],
        0,
        {0: (OUTPUTS + STATISTICS, 5, 2), 2: (VIDEO + OUTPUTS + STATISTICS, 6, 4)},
    ),
}


@functools.cache
def forecast() -> Forecast:
    return Forecast(subject(stack(layers=LAYERS), stack_inputs(), "blocks"))


@pytest.mark.parametrize("case", CASES)
def test_bytes_leave_the_device_between_two_moments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the step without offload, whose bytes are alive at the same moments but for those between."""
    policies, smallest, leaves = CASES[case]
    monkeypatch.setattr(offload, "SMALLEST", smallest)
    found = forecast()
    offloading = {f"blocks.{number}": policy for number, policy in enumerate(policies)}
    staying = {name: dataclasses.replace(policy, offload=False) for name, policy in offloading.items()}
    saved, plan, without = found.full.saved(staying), found.plan(offloading), found.plan(staying)
    alive = np.cumsum([one.bytes + one.change * (one.candidate in saved) for one in found.full.events])
    assert found.states.total + alive.max() == without.peak_bytes

    marks = [index for index, event in enumerate(found.full.events) if event == Event(0)]
    assert len(marks) == LAYERS + 1 + LAYERS, "forwards, the end, recomputes"
    for size, left, returns in leaves.values():
        alive[marks[left] : marks[2 * LAYERS - returns]] -= size
    host = sum(size for size, _, _ in leaves.values())
    assert (plan.host_bytes, plan.held_bytes) == (host, without.held_bytes - host)
    assert plan.peak_bytes == found.states.total + alive.max()
    assert (plan.saved_bytes, plan.flops) == (without.saved_bytes, without.flops)
    forward = found.full.flops["forward"] / LAYERS  # the backward of a block takes longer
    assert plan.bytes_per_flop == max(size for size, _, _ in leaves.values()) / forward


@pytest.mark.parametrize("name", quick([WAN, LTX, COGVIDEOX, HUNYUAN_VIDEO, "LTX2VideoTransformer3DModel"], WAN))
def test_prediction_is_measurement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes on the device, in the forward's end and at the worst moment, and of those on the host."""
    monkeypatch.setattr("fastac.planning.simulation.GENERATOR_STATE", 0)
    model, inputs = tiny(name, num_layers=5)
    found = Forecast(subject(model, inputs))
    for policy in (
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
        Kept(10, ["a"]),
        Kept(9, ["a"]),  # small
        Kept(1000, ["a", "b"]),  # of more than one
        Kept(20, ["b"], ("a", 0)),  # leaves with the later one
        Kept(2000, ["c"], ("b", 0)),  # one of those that stay
        Kept(300, [], ("b", 0)),
        Kept(4000, [], ("b", 1)),  # not saved
    ]
    candidates = {name: [Candidate("attention", flops=90, keys=2), Candidate("attention", keys=1)] for name in names}
    events = [Event(0) for _ in range(9)]
    events[0].bytes = 10_000
    step = Timeline(events, 5, Counter(forward=400), candidates, begins, kept)
    stay = dict.fromkeys(names, Policy(min_kv=2))
    assert (step.held(stay), step.peak(stay)) == (10_000, 10_000)
    policies = dict.fromkeys(names, Policy(min_kv=2, offload=True))
    first, second = step.copies(policies)
    assert (first.bytes, first.left.event, first.returns.event) == (10, 3, 7)
    assert (second.bytes, second.left.event, second.returns.event) == (320, 4, 6)
    assert step.held(policies) == 10_000 - 330
    assert step.bytes_per_flop(policies) == 320 / (150 - 90), "while it comes back, beside a replayed attention"
    policies["b"] = Policy(min_kv=2, offload="attention")
    assert [one.bytes for one in step.copies(policies)] == [10, 300], "what is on the device anyway"


def test_wan_14b_holds_less_than_full_checkpointing_and_runs_less_again() -> None:
    """On 75,600 tokens, with 6 of its 40 blocks."""
    wan = configurations.load("wan2.1-t2v-14b")
    wan = dataclasses.replace(wan, config=with_layers(wan.config, 6))
    video = dataclasses.replace(wan.default, frames=81, height=720, width=1280)
    found = Forecast(subject(without_weights(wan, video.dtype, lora=32), wan.inputs(video)))
    full, best = found.plan("full"), found.plan(ROWS["long_attn_only, offload"])
    assert best.held_bytes < full.held_bytes
    assert best.peak_bytes < full.peak_bytes
    assert best.relative < 0.84
    assert best.bytes_per_flop * 400e12 < 6e9, "PCIe 4 x16 has 25e9"
