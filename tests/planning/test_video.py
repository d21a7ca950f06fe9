"""Plans of configurations and videos: the longest that fits a memory, several GPUs, and context parallelism."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fastac.errors import FastacError
from fastac.models import published as configurations
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.simulation import Split
from fastac.planning.timeline import Event
from fastac.planning.video import Training, most_steps, plan_video, without_weights
from fastac.policy import Policy
from tests.marks import needs_diffusers
from tests.models.tiny import TINY

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def small(tmp_path: Path) -> Configuration:
    """A Wan transformer of three small blocks, with positions for 24 frames of latents."""
    config = {**TINY["WanTransformer3DModel"].config, "num_layers": 3, "rope_max_seq_len": 24}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    return configurations.load_configuration(str(path))


def video_of(configuration: Configuration, frames: int = 33, text_tokens: int = 8) -> Video:
    return dataclasses.replace(configuration.default, frames=frames, height=32, width=64, text_tokens=text_tokens)


# The longest video


def searched(peaks: Mapping[int, int], memory: int, start: int) -> tuple[int, int]:
    """What a search finds where only some numbers of steps are taken, and how many peaks it asks for."""
    asked: list[int] = []

    def peak(steps: int) -> int | None:
        asked.append(steps)
        assert len(asked) <= 40, "it does not end"
        return peaks.get(steps)

    return most_steps(peak, memory, start), len(asked)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_video_is_the_one_of_brute_force(seed: int) -> None:
    """Where few frames are refused, or many; from one video on that fits or does not."""
    random = Random(seed)
    slope, size = random.choice((1, 100, 10_000)), random.choice((3, 10, 60))
    sizes = list(itertools.accumulate(random.randrange(1, 2 * slope + 1) for _ in range(size)))
    at = random.choice((0, 0, 5, 20))
    peaks = {at + step: 500 + peak for step, peak in enumerate(sizes)}
    for memory in (0, 500 + sizes[0], *(500 + random.choice(sizes) - random.randrange(2) for _ in range(5)), 10**9):
        expected = max((steps for steps, peak in peaks.items() if peak <= memory), default=-1)
        assert searched(peaks, memory, random.choice(list(peaks)))[0] == expected
    gaps = {step: 500 + 10 * step for step in range(60) if random.randrange(3)}
    for memory in (400, 600, 2000):  # where some in between are refused, what it finds fits, and it ends
        found, _ = searched(gaps, memory, random.choice(list(gaps)))
        assert found == -1 or gaps[found] <= memory


def test_a_search_is_short() -> None:
    """Bytes are nearly proportional to frames; also where the peak is that of the optimizer's step at first."""
    peaks = {step: 10**9 + 10**7 * step + step % 7 for step in range(10_000)}
    assert searched(peaks, 30 * 10**9, 20) == (2899, 6)
    bent = {step: 1_000_000 + step + 10_000 * max(0, step - 50) for step in range(400)}
    assert searched(bent, bent[55], 1) == (55, 11)


@pytest.mark.parametrize("which", ["none", "full"])
def test_a_step_of_any_length_lies_on_a_line(small: Configuration, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulations tell the bytes of all lengths, to the byte."""
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 2500)  # statistics of attention are smaller

    def simulated(frames: int) -> Any:
        part = video_of(small, frames)
        return Forecast(fake_model(without_weights(small, part.dtype), small.inputs(part))).step(which)

    near, far, expected = map(simulated, (9, 33, 57))
    found = near.on_line(far, Fraction(2))
    for name in ("attn_only", "full"):
        for policy in (Policy(name), Policy(name, offload=True, keep=1)):
            policies = dict.fromkeys(far.candidates, policy)
            assert (found.held(policies), found.peak(policies)) == (expected.held(policies), expected.peak(policies))
        copies = found.host_copies(policies)
        assert [one.bytes for one in copies] == [one.bytes for one in expected.host_copies(policies)]
        assert len(copies) == (2 if which == "full" else 0)
    assert [one.keys for one in found.candidates["blocks.0"]] == [one.keys for one in expected.candidates["blocks.0"]]
    far = dataclasses.replace(far, events=[*far.events[:5], Event(0, gradient=True), *far.events[6:]])
    assert near.on_line(far, Fraction(2)) is None


@pytest.mark.slow
def test_the_longest_video_is_one_that_the_model_takes(small: Configuration) -> None:
    """Of 24 positions, with any memory: also where it takes a video twice as long."""
    for frames in (77, 37):
        found = plan_video(small, video_of(small, frames), memory=2**40)
        assert found.largest["full"] == 93


def test_the_longest_video_fits(small: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next longer one does not; within a budget, too."""
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 0)
    memory = 300_000
    found = plan_video(small, video_of(small, 9), memory=memory, budget=20_000, offload=True)
    assert list(found.largest) == [*ROWS, "within 19.5 KiB, offload"]
    assert 0 < found.largest["none"] < found.largest["full"] <= found.largest["full, offload"]
    for policy in ("full", "attn_only, offload"):
        frames = found.largest[policy]
        peaks = [
            Forecast(fake_model(without_weights(small, torch.bfloat16), small.inputs(video_of(small, one)))).peak(
                ROWS[policy]
            )
            for one in (frames, frames + 4)
        ]
        assert peaks[0] <= memory < peaks[1], policy


def test_a_search_ends_where_short_videos_are_refused(small: Configuration) -> None:
    """A rank needs more tokens than the text has: fewer frames, which would hold less, cannot be planned."""
    found = plan_video(small, video_of(small, 33, 24), Training(gpus=2, context_parallel=2), memory=10 * 2**10)
    assert set(found.largest.values()) == {0}
    assert found.budget is None
    assert "no policy fits" in str(found)


def test_videos_that_are_refused(small: Configuration) -> None:
    for frames, training, message in (
        (113, Training(), "does not run on 1 x 113 frames"),
        (9, Training(gpus=7, context_parallel=7), "into 7 equal parts"),
        (5, Training(gpus=2, context_parallel=2), "with 2 context parallel ranks each rank has 8 video tokens"),
    ):
        with pytest.raises(FastacError, match=message):
            plan_video(small, video_of(small, frames), training)
    for gpus, ranks in [(0, 1), (1, 2), (8, 3)]:
        with pytest.raises(FastacError, match=rf"{ranks} does not divide {gpus} GPUs"):
            Training(gpus=gpus, context_parallel=ranks)


# Several GPUs


@needs_diffusers("0.40")  # before, rotary embeddings are other buffers
def test_gpus_share_states_and_gradients(small: Configuration) -> None:
    one, four = (plan_video(small, video_of(small, 5), Training(gpus=gpus)) for gpus in (1, 4))
    buffers = 2 * 24 * 12 * 4  # of rotary embeddings, which FSDP2 does not shard
    assert four.states.weights - buffers == (one.states.weights - buffers) // 4
    assert four.states.optimizer == one.states.optimizer // 4 == 2 * four.gradients
    assert four.gradients == one.gradients // 4
    assert one.states.gathered == 0 < four.states.gathered
    for mine, theirs in zip(one.policies, four.policies, strict=True):
        assert (mine.held_bytes, mine.flops) == (theirs.held_bytes, theirs.flops)
        saved = one.states.total - four.states.total
        assert saved <= mine.peak_bytes - theirs.peak_bytes <= saved + one.gradients - four.gradients


def test_context_parallelism_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention, and the collectives around it, hold on a rank of two; and what of it is the collectives'."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from held_bytes import build_wan, wan_inputs

    measured = json.loads((BENCHMARKS / "results" / "distributed_cpu.json").read_text())
    held = {row["policy"]: row["held"] for row in measured["results"] if row["engine"] == "Ulysses"}
    model: Any = build_wan(measured["layers"], torch.float32)
    inputs = wan_inputs(torch.float32)
    whole = Forecast(fake_model(model, inputs))
    inputs["hidden_states"] = inputs["hidden_states"].chunk(2, dim=3)[0].contiguous()
    found = Forecast(fake_model(model, inputs), split=Split(2, measured["tokens"] // 2))
    full, saves, repeats = map(found.plan, ("full", "attn_only", Policy(collectives="recompute")))
    assert saves.held_bytes - repeats.held_bytes == held["attn_only"] - held['attn_only, collectives="recompute"']
    assert saves.held_bytes - full.held_bytes == saves.saved_bytes == held["attn_only"] - held["full"]
    assert saves.flops == repeats.flops
    attention = [[one.flops for one in which.full.candidates["blocks.0"] if one.keys] for which in (whole, found)]
    assert [mine * 2 for mine in attention[1]] == attention[0]


def test_a_budget_counts_collectives_first(small: Configuration) -> None:
    """Where they are more than the budget they are issued again."""
    video, training = video_of(small, 33, 8), Training(gpus=2, context_parallel=2)
    plan = plan_video(small, video, training)
    saved = {one.policy: one.saved_bytes for one in plan.policies}
    for limit, collectives in (
        (saved["attn_only"], "save"),
        (saved["attn_only"] * 9 // 10, "save"),
        (20_000, "recompute"),
    ):
        chosen = plan.within(limit)
        assert {policy.collectives for policy in chosen.values() if not policy.saves_nothing} == {collectives}
        assert 0 < plan.forecast.plan(chosen).saved_bytes <= limit
        assert plan.forecast.plan(chosen).recomputed_flops < plan.policies[1].recomputed_flops
