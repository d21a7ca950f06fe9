"""`fastac plan` of configurations and videos: the longest that fits, several GPUs, and context parallelism."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastac import Policy
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import Forecast
from fastac.planning.simulation import Split
from tests.cli.conftest import Command, configuration
from tests.planning import planned

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Plans = Callable[..., dict[str, Any]]


@pytest.fixture
def plans(command: Command, tmp_path: Path) -> Plans:
    """Plans a video of a Wan transformer of three small blocks, with positions for 24 frames of latents.

    Returns the plan as JSON, its rows by name; or what is said on stderr where there is none.
    """
    path = configuration(tmp_path, "WanTransformer3DModel", num_layers=3, rope_max_seq_len=24)

    def plan(frames: int, *options: str, text_tokens: int = 8) -> dict[str, Any]:
        sizes = ["--frames", str(frames), "--height", "32", "--width", "64", "--text-tokens", str(text_tokens)]
        ran = command("plan", path, *sizes, *options, "--json")
        if ran.status:
            return {"error": ran.err}
        found: dict[str, Any] = json.loads(ran.out)
        return found | {"rows": {row["policy"]: row for row in found["policies"]}}

    return plan


# The longest video


@pytest.mark.slow
def test_the_longest_video_is_one_that_the_model_takes(plans: Plans) -> None:
    """Of 24 positions, with any memory: also where it takes a video twice as long."""
    for frames in (77, 37):
        assert plans(frames, "--memory", "1TiB")["largest"]["full"] == 93


@pytest.mark.slow
def test_the_longest_video_fits(plans: Plans) -> None:
    """To the byte, though most lengths are not simulated: bytes grow on a line. Within a budget, too.

    But a video of one token does not do what others do: then each length is simulated.
    """
    with planned.exact():
        rows = plans(41)["rows"]
        budget = ("--budget", "20000B", "--offload")
        for policy, less, frames in (("full", 0, 41), ("full", 1, 37), ("attn_only, offload", 0, 41)):
            memory = rows[policy]["peak_bytes"] - less
            largest = plans(9, "--memory", f"{memory}B", *budget)["largest"]
            assert largest[policy] == frames, policy
        assert list(largest) == [*rows, "within 19.5 KiB, offload"]
        frames = largest["within 19.5 KiB, offload"]
        fits, does_not = (plans(one, *budget)["policies"][-1]["peak_bytes"] for one in (frames, frames + 4))
        assert fits <= memory < does_not
        token = ("--height", "16", "--width", "16")
        memory = plans(41, *token)["rows"]["full"]["peak_bytes"]
        assert plans(1, *token, "--memory", f"{memory}B")["largest"]["full"] == 41


def test_a_search_ends_where_short_videos_are_refused(plans: Plans) -> None:
    """A rank needs more tokens than the text has: fewer frames, which would hold less, cannot be planned."""
    found = plans(33, "--gpus", "2", "--context-parallel", "2", "--memory", "10KiB", text_tokens=24)
    assert set(found["largest"].values()) == {0}
    assert (found["budget"], found["blocks"]) == (None, {})


@pytest.mark.slow
def test_the_longest_video_is_one_that_ranks_can_split(plans: Plans) -> None:
    """Two ranks split rows of three tokens only in an even number of frames of latents: a shorter video is found."""
    sizes = ("--height", "16", "--width", "48", "--gpus", "2", "--context-parallel", "2")
    with planned.exact():
        longer = plans(37, *sizes, text_tokens=1)["rows"]["full"]["peak_bytes"]
        largest = plans(13, *sizes, "--memory", f"{longer - 1}B", text_tokens=1)["largest"]
    assert "into 2 equal parts" in plans(33, *sizes, text_tokens=1)["error"]
    assert largest["full"] == 29
    # Of 24 positions on each rank, with any memory.
    assert plans(21, *sizes, "--memory", "1TiB", text_tokens=1)["largest"]["full"] == 189


def test_videos_that_are_refused(plans: Plans) -> None:
    for frames, gpus, ranks, message in (
        (113, 1, 1, "does not run on 1 x 113 frames"),
        (9, 7, 7, "into 7 equal parts"),
        (5, 2, 2, "with 2 context parallel ranks each rank has 8 video tokens"),
        (5, 0, 1, "1 does not divide 0 GPUs"),
    ):
        assert message in plans(frames, "--gpus", str(gpus), "--context-parallel", str(ranks))["error"]


# Several GPUs


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
    full, saves, repeats = map(found.figures, ("full", "attn_only", Policy(collectives="recompute")))
    assert saves.held_bytes - repeats.held_bytes == held["attn_only"] - held['attn_only, collectives="recompute"']
    assert saves.held_bytes - full.held_bytes == saves.saved_bytes == held["attn_only"] - held["full"]
    assert saves.flops == repeats.flops
    attention = [[one.flops for one in which.full.candidates["blocks.0"] if one.keys] for which in (whole, found)]
    assert [mine * 2 for mine in attention[1]] == attention[0]


@pytest.mark.slow
def test_a_budget_counts_collectives_first(plans: Plans) -> None:
    """Where they are more than the budget they are issued again."""
    parallel = ("--gpus", "2", "--context-parallel", "2", "--lora", "1", "--optimizer", "adamw8bit")
    first = plans(33, *parallel)
    assert first["inputs"].endswith("LoRA of rank 1, adamw8bit, 2 GPUs (FSDP2), context parallel over 2")
    assert 2 * first["states"]["optimizer"] < 3 * first["gradients"] < first["states"]["weights"]
    saved = first["rows"]["attn_only"]["saved_bytes"]
    for limit, collectives in ((saved, "save"), (saved * 9 // 10, "save"), (20_000, "recompute")):
        found = plans(33, *parallel, "--budget", f"{limit}B")
        policies = [one for one in found["blocks"].values() if one["name"] not in ("full", "none")]
        assert {policy["collectives"] for policy in policies} == {collectives}
        assert 0 < found["policies"][-1]["saved_bytes"] <= limit
        assert found["policies"][-1]["recomputed_flops"] < found["rows"]["full"]["recomputed_flops"]
