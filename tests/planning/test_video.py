"""Plans of configurations and videos: the longest that fits a memory, several GPUs, and context parallelism."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastac import video_planning
from fastac.errors import FastacError
from fastac.events import Split
from fastac.forecast import Forecast
from fastac.models import MODELS, configurations
from fastac.models.configurations import Configuration
from fastac.models.videos import Video
from fastac.plans import Plan
from fastac.policy import Policy
from fastac.subjects import subject
from fastac.video_planning import Training, plan_video
from tests import planned
from tests.planned import build_wan, wan_inputs

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


@pytest.fixture
def small(tmp_path: Path) -> Configuration:
    """A Wan transformer of three small blocks, with positions for 64 frames of latents."""
    config = {**MODELS["WanTransformer3DModel"].config, "num_layers": 3, "rope_max_seq_len": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    return configurations.load(str(path))


def video_of(configuration: Configuration, frames: int = 33, text_tokens: int = 8) -> Video:
    return dataclasses.replace(configuration.default, frames=frames, height=32, width=64, text_tokens=text_tokens)


def peaks_of(found: Plan) -> dict[str, int]:
    return {one.policy: one.peak_bytes for one in found.policies}


# The longest video


def search_of(configuration: Configuration, peaks: Mapping[int, int], known: Sequence[int]) -> Any:
    """A search of a model that takes videos of so many frames alone, of which some were simulated already."""
    search: Any = video_planning._Search(
        configuration, video_of(configuration, known[0]), Training(), lambda text: None
    )
    simulated = SimpleNamespace(forecast=SimpleNamespace(was_simulated=lambda checkpoints: True))
    search._planners = dict.fromkeys(known, simulated)
    asked: list[int] = []

    def peak(frames: int, policy: str, limit: int | None) -> int:
        asked.append(frames)
        if len(asked) > 40:
            pytest.fail("it does not end")  # which is no error that a model might raise
        if frames not in peaks:
            raise FastacError("the model does not take it")
        return peaks[frames]

    search.peak = peak
    return search


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_video_is_the_one_of_brute_force(seed: int, small: Configuration) -> None:
    """Where few frames are refused, or many; from one video on or from several, that fit or do not."""
    random = Random(seed)
    slope, size = random.choice((1, 100, 10_000)), random.choice((3, 10, 60))
    sizes = list(itertools.accumulate(random.randrange(1, 2 * slope + 1) for _ in range(size)))
    at = random.choice((0, 0, 5, 20))
    peaks = {1 + 4 * (at + step): 500 + peak for step, peak in enumerate(sizes)}
    for memory in (0, 500 + sizes[0], *(500 + random.choice(sizes) - random.randrange(2) for _ in range(5)), 10**9):
        known = random.sample(list(peaks), random.randrange(1, min(4, size)))
        expected = max((frames for frames, peak in peaks.items() if peak <= memory), default=0)
        assert search_of(small, peaks, known).longest("full", memory, None) == expected


@pytest.mark.parametrize("bend", [3, 50, 190])
def test_a_search_is_short_where_the_peak_moves_to_another_moment(bend: int, small: Configuration) -> None:
    """That of the optimizer's step at first, which no frame changes much: lines through it are no guide."""
    peaks = {1 + 4 * step: 1_000_000 + step + 10_000 * max(0, step - bend) for step in range(400)}
    for steps in (bend, bend + 1, bend + 5, bend + 150):
        memory = peaks[1 + 4 * steps]
        assert search_of(small, peaks, [1, 5]).longest("full", memory, None) == 1 + 4 * steps


@pytest.mark.parametrize("seed", range(20))
def test_a_search_ends_where_videos_in_between_are_refused(seed: int, small: Configuration) -> None:
    """Of tokens that can not be split, say. What it finds fits."""
    random = Random(seed)
    peaks = {1 + 4 * step: 500 + 10 * step for step in range(60) if random.randrange(3)}
    for memory in (400, 600, 800, 1000, 2000):
        known = random.sample(list(peaks), random.randrange(1, 4))
        found = search_of(small, peaks, known).longest("full", memory, None)
        assert found == 0 or peaks[found] <= memory
        assert found >= max((frames for frames in known if peaks[frames] <= memory), default=0)


def test_a_search_is_short(small: Configuration) -> None:
    """Bytes are nearly proportional to frames: few guesses are needed."""
    peaks = {1 + 4 * step: 10**9 + 10**7 * step + step % 7 for step in range(10_000)}
    search = search_of(small, peaks, [81])
    asked, peak = [], search.peak
    search.peak = lambda frames, *args: asked.append(frames) or peak(frames, *args)
    assert search.longest("full", 30 * 10**9, None) == 4 * 2899 + 1
    assert len(asked) < 10


@pytest.mark.slow
def test_the_longest_video_of_each_policy(small: Configuration) -> None:
    """It fits, and the next longer one does not."""
    memory = 500_000
    found = plan_video(small, video_of(small, 9), memory=memory)
    assert list(found.largest) == ["none", "full", "long_attn_only", "attn_only", "ops"]
    assert found.largest["none"] < found.largest["attn_only"] < found.largest["full"]
    for policy, frames in found.largest.items():
        if policy in ("none", "full"):
            assert peaks_of(plan_video(small, video_of(small, frames)))[policy] <= memory
            assert peaks_of(plan_video(small, video_of(small, frames + 4)))[policy] > memory


def test_the_longest_video_is_one_that_the_model_takes(small: Configuration) -> None:
    """Of 64 positions, with any memory; in time, and without inputs of any size."""
    search: Any = video_planning._Search(small, video_of(small, 237), Training(), lambda text: None)
    search.planner(237).policy("full")
    assert search.longest("full", 2**40, None) == 253
    assert max(search._planners) < 2_000


def test_a_search_ends_where_short_videos_are_refused(small: Configuration) -> None:
    """A rank needs more tokens than the text has: fewer frames, which would hold less, can not be planned."""
    found = plan_video(small, video_of(small, 33, 24), Training(gpus=2, context_parallel=2), memory="10KiB")
    assert set(found.largest.values()) == {0}
    assert found.budget is None
    assert "no policy fits" in str(found)


def test_a_video_that_is_not_taken_is_one_error(small: Configuration) -> None:
    with pytest.raises(FastacError, match=r"plan: .*config\.json does not run on 1 x 273 frames of 32 x 64"):
        plan_video(small, video_of(small, 273))


# Several GPUs


def test_gpus_share_states_and_gradients(small: Configuration) -> None:
    one, four = (plan_video(small, video_of(small, 5), Training(gpus=gpus)) for gpus in (1, 4))
    buffers = 2 * 64 * 12 * 4  # of rotary embeddings, which FSDP2 does not shard
    assert four.states.weights - buffers == (one.states.weights - buffers) // 4
    assert four.states.optimizer == one.states.optimizer // 4 == 2 * four.gradients
    assert four.gradients == one.gradients // 4
    assert one.states.gathered == 0 < four.states.gathered
    for mine, theirs in zip(one.policies, four.policies, strict=True):
        assert (mine.held_bytes, mine.flops) == (theirs.held_bytes, theirs.flops)
        saved = one.states.together - four.states.together
        assert saved <= mine.peak_bytes - theirs.peak_bytes <= saved + one.gradients - four.gradients


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (1, 0), (1, 2), (8, 3), (-2, -1)])
def test_ranks_that_do_not_divide_gpus(gpus: int, ranks: int) -> None:
    with pytest.raises(FastacError, match=rf"a context parallel degree of {ranks} does not divide {gpus} GPUs"):
        Training(gpus=gpus, context_parallel=ranks)


def test_context_parallelism_is_what_was_measured() -> None:
    """What attention, and the collectives around it, hold on a rank of two; and what of it is the collectives'."""
    measured = json.loads((RESULTS / "distributed_cpu.json").read_text())
    held = {row["policy"]: row["held"] for row in measured["results"] if row["engine"] == "Ulysses"}
    model, inputs = build_wan(measured["layers"], torch.float32), wan_inputs(torch.float32)
    whole = Forecast(subject(model, inputs))
    inputs["hidden_states"] = inputs["hidden_states"].chunk(2, dim=3)[0].contiguous()
    found = Forecast(subject(model, inputs), split=Split(2, measured["tokens"] // 2))
    full, saves, repeats = (
        planned.plan_of(found, policy) for policy in (Policy("full"), Policy(), Policy(collectives="recompute"))
    )
    assert saves.held_bytes - repeats.held_bytes == held["attn_only"] - held['attn_only, collectives="recompute"']
    assert saves.held_bytes - full.held_bytes == saves.saved_bytes == held["attn_only"] - held["full"]
    assert saves.flops == repeats.flops
    assert {one.keys for one in found.candidates["blocks.0"] if one.keys} == {measured["tokens"], 128}
    attention = [[one.flops for one in which.candidates["blocks.0"] if one.keys] for which in (whole, found)]
    assert [mine * 2 for mine in attention[1]] == attention[0]


def test_a_budget_counts_collectives_first(small: Configuration) -> None:
    """Where they are more than the budget they are issued again."""
    video, training = video_of(small, 33, 8), Training(gpus=2, context_parallel=2)
    saved = {one.policy: one.saved_bytes for one in plan_video(small, video, training).policies}
    much, little = (plan_video(small, video, training, budget=limit) for limit in (saved["attn_only"], 20_000))
    assert {policy.collectives for policy in much.blocks.values()} == {"save"}
    assert {policy.collectives for policy in little.blocks.values() if not policy.saves_nothing} == {"recompute"}
    assert little.policies[-1].saved_bytes <= 20_000
    assert much.policies[-1].saved_bytes <= saved["attn_only"]


def test_tokens_that_can_not_be_split(small: Configuration) -> None:
    with pytest.raises(FastacError, match=r"tokens of 9 frames of 32 x 64 can not be split into 7 equal parts"):
        plan_video(small, video_of(small, 9), Training(gpus=7, context_parallel=7))


def test_a_rank_needs_more_tokens_than_the_text() -> None:
    configuration = configurations.load("wan2.1-t2v-1.3b")
    video = dataclasses.replace(configuration.default, frames=5, height=128, width=256)
    with pytest.raises(FastacError, match=r"each of 2 context parallel ranks would have 128 tokens of 5 frames"):
        plan_video(configuration, video, Training(gpus=2, context_parallel=2))


# Published models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan2.1-t2v-14b", "hunyuanvideo", "cogvideox-5b"])
def test_a_large_model_takes_less_than_a_minute(name: str) -> None:
    configuration = configurations.load(name)
    begin = time.process_time()
    found = plan_video(configuration, configuration.default, budget="40GiB")
    assert time.process_time() - begin < 60
    assert found.policies[-1].saved_bytes <= 40 * 2**30
    assert peaks_of(found)["full"] <= peaks_of(found)["attn_only"] < peaks_of(found)["none"]
