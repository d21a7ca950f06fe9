"""fastac bench: what is counted and compared is exact; no time is expected, but figures follow from times."""

from __future__ import annotations

import functools
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

import fastac
from fastac.errors import readable_bytes
from fastac.planning.auto import TURNS
from fastac.verification import measuring, ways
from tests.cli.conftest import Command, configuration
from tests.engine.simulated import simulated
from tests.planning.planned import WAN, is_planned, tiny
from tests.support import cells_of

NAMES = ["none", "full", "attn_only", "long_attn_only", "planned", "auto", "torch SAC, by name"]


@pytest.fixture
def bench(command: Command, small: list[str], tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Measures in fp32: what the command printed, and its JSON, with the rows by name."""
    path = tmp_path / "bench.json"

    def run(*options: str, of: list[str] = small) -> tuple[Any, Any]:
        ran = command("bench", *of, "--dtype", "fp32", *options, "--json", str(path))
        assert ran.status == 0, ran.err
        found = json.loads(path.read_text())
        return ran, found | {"rows": {row["variant"]: row for row in found["rows"]}}

    return run


def way_of(model: Any) -> str:
    """How a model checkpoints."""
    report = fastac.report(model)
    if report.active:
        return report.policy if report.policy in NAMES else "planned"
    if not model.is_gradient_checkpointing:
        return "none"
    options = getattr(model._gradient_checkpointing_func, "keywords", {})
    return "torch SAC, by name" if "context_fn" in options else "full"


Step = Callable[[str, Callable[[], Any]], Any]


def stepping(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    """Call a function for each forward that is no simulation, with the way of checkpointing and the forward."""
    forward = WanTransformer3DModel.forward

    @functools.wraps(forward)
    def called(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(forward, self, hidden_states, *args, **kwargs)
        return run() if is_planned(hidden_states) else step(way_of(self), run)

    monkeypatch.setattr(WanTransformer3DModel, "forward", called)


def test_every_way_is_measured(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks with two attention calls each, in a table of 80 columns."""
    monkeypatch.delenv("COLUMNS")
    ran, found = bench("--rounds", "2", "--layers", "2", "--frames", "33", "--height", "64", "--width", "64")
    rows = found["rows"]
    assert list(rows) == NAMES
    assert [name for name, row in rows.items() if row["problem"]] == ["long_attn_only"], "no attention is long here"
    measured = {name: row for name, row in rows.items() if not row["problem"]}
    attention = {name: row["attention"] for name, row in measured.items()}
    assert 4 <= attention.pop("planned") <= 8
    assert attention == {"none": 4, "full": 8, "attn_only": 4, "auto": 4, "torch SAC, by name": 4}
    for row in measured.values():
        ratios = [mine / full for mine, full in zip(row["seconds"], rows["full"]["seconds"], strict=True)]
        assert row["relative"] == statistics.median(ratios)
        assert row["compared"] > 40
        assert row["peak_bytes"] > row["held_bytes"]
        assert (row["different"], row["largest_difference"]) == (0, 0.0)
    assert (found["reference"], found["noise"]) == ("none", 0.0)
    none, full, saved = (rows[name] for name in NAMES[:3])
    held = {name: row["held_bytes"] for name, row in measured.items()}
    assert held["none"] == held["auto"] > held["attn_only"] > held["full"]
    assert held["attn_only"] - held["full"] == found["budget"], "what fastac.report says is saved"
    assert 0 < held["planned"] - held["full"] <= found["budget"]
    assert none["peak_bytes"] > saved["peak_bytes"] > full["peak_bytes"]
    assert (none["chosen"], rows["auto"]["chosen"].partition(";")[0]) == ("", "no checkpointing")

    text, cells = " ".join(ran.out.split()), cells_of(ran.out)
    assert 70 < max(map(len, ran.out.splitlines())) <= 80, ran.out
    assert {"long_attn_only", "planned"} < set(cells), "names are broken between words"
    assert cells["attn_only"][0] == f"{saved['relative']:.3f}"
    assert cells["attn_only"][4] == "4"
    assert f"budget: {readable_bytes(found['budget'])}" in text
    assert "auto: no checkpointing; " in text


def test_timed_steps_are_ordinary_ones(
    bench: Callable[..., Any], available: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each follows another of its way, after which no values are compared; "auto" has settled its plan by then."""
    forwards: list[list[Any]] = []
    norm = torch.linalg.vector_norm

    def noted(*args: Any, **kwargs: Any) -> Any:
        forwards[-1][1] += 1
        return norm(*args, **kwargs)

    def step(way: str, run: Callable[[], Any]) -> Any:
        forwards.append([way, 0])
        return run()

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    stepping(monkeypatch, step)
    available(5_000_000)
    _, found = bench("--rounds", "2", "--layers", "1")
    ways = [name for name, row in found["rows"].items() if not row["problem"]]
    rounds = forwards[-4 * len(ways) :]
    for (switched, _), (timed, compared) in zip(rounds[::2], rounds[1::2], strict=True):
        assert (timed, compared) == (switched, 0)
    assert sorted(way for way, _ in rounds) == sorted(4 * ways)
    assert any(compared for way, compared in rounds[::2] if way == "attn_only")
    count = [way for way, _ in forwards].count
    assert count("auto") - count("attn_only") == TURNS
    limit = readable_bytes(int((5_000_000 // 1024 * 1024 * 9 // 10 + found["weights"]) * 0.94))
    assert found["rows"]["auto"]["chosen"].endswith(f" of {limit} planned")


@pytest.mark.slow
def test_ways_that_do_not_run_and_ways_that_differ(
    bench: Callable[..., Any], command: Command, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They become rows; the first way that runs is the reference."""
    errors: dict[str, Exception] = {
        "full": RuntimeError("an op was changed in place"),
        "attn_only": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        "planned": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"),
    }

    def step(way: str, run: Callable[[], Any]) -> Any:
        if way in errors or (way == "none" and not gc.isenabled()):  # this one late, in turns
            raise errors.get(way, torch.OutOfMemoryError("CUDA out of memory"))
        outputs = run()
        return tuple(2 * one for one in outputs) if way == "torch SAC, by name" else outputs

    with monkeypatch.context() as patch:
        stepping(patch, step)
        ran, found = bench("--rounds", "1", "--layers", "1")
    problems = {name: row["problem"] for name, row in found["rows"].items()}
    refused, memory = problems.pop("long_attn_only"), "out of memory"
    assert refused.startswith("refused: ")
    assert f"long_attn_only: {refused}"[:40] in ran.out, "the rest of it stands below the table"
    failed = "failed: an op was changed in place"
    assert problems == dict(zip([*NAMES[:3], *NAMES[4:]], [memory, failed, memory, memory, "", ""], strict=True))
    assert found["reference"] == "none"
    row = found["rows"]["torch SAC, by name"]
    assert 0 < row["different"] <= row["compared"]
    assert row["largest_difference"] > 0
    assert f"{row['different']} of {row['compared']} differ, by up to " in " ".join(ran.out.split())

    def fails(error: Exception) -> Any:
        def step(way: str, run: Callable[[], Any]) -> Any:
            raise error

        stepping(monkeypatch, step)
        return command("bench", *small, "--rounds", "1")

    with pytest.raises(TypeError):  # a mistake of fastac's own is no row
        fails(TypeError("a mistake"))
    assert "no step could be run here: failed: no backward here" in fails(RuntimeError("no backward here")).err


def test_kernels_that_are_not_deterministic_are_reported(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def step(way: str, run: Callable[[], Any]) -> Any:
        if way != "none":
            raise RuntimeError("left out")
        steps.append(way)
        return tuple(one + len(steps) for one in run())

    stepping(monkeypatch, step)
    _, found = bench("--rounds", "1", "--layers", "1")
    assert found["noise"] > 0.5


def test_what_a_gpu_alone_shows() -> None:
    """Copies that it waited for are said, and only with `--offload` may "auto" take memory of the host."""
    row = ways.Measurement("attn_only, offload", host_bytes=2048, copies=4, waited_bytes=(1024,), seconds=(1.0,))
    found = ways.Measurements("", "cuda", 1, 0, None, "none", 0.0, (row,))
    assert "attn_only, offload: 2.0 KiB on the host, 1 of 4 copies waited for (1.0 KiB)" in str(found)
    workload = ways.Workload(*tiny(WAN))
    assert [ways.Ways(workload, offload=one).planner.auto.host for one in (False, True)] == [0, None]


def test_ways_take_turns() -> None:
    """In every round each way once, in several orders; the time of a switch is nobody's. Compared within a round."""
    seconds = {"full": [1.0, 10.0, 4.0], "attn_only": [2.0, 3.0, 4.0]}
    assert measuring.relative(seconds, "full") == {"full": 1.0, "attn_only": 1.0}, "the medians' would be 0.75"
    assert measuring.relative({"attn_only": [1.0]}, "full") == {}
    now, order = [0.0], []
    costs = {"a": 1.0, "b": 2.0, "c": 4.0}

    def switch(name: str) -> None:
        now[0] += 100
        order.append(name)

    def step() -> None:
        now[0] += costs[order[-1]]

    found = measuring.take_turns(list(costs), 8, switch, step, clock=lambda: now[0])
    assert found == ({name: [cost] * 8 for name, cost in costs.items()}, {})
    rounds = [tuple(order[i : i + 3]) for i in range(0, 24, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_configuration_and_a_video(bench: Callable[..., Any], small: list[str], tmp_path: Path) -> None:
    """Of every list of blocks the first; with what waits on the host, and a budget of one's own."""
    of = [configuration(tmp_path, "WanVACETransformer3DModel", num_layers=5, vace_layers=[0, 4]), *small[1:]]
    options = ("--rounds", "1", "--layers", "3", "--batch", "2", "--offload", "--budget", "20KiB")
    with simulated(late=False):
        ran, found = bench(*options, of=of)
    assert ran.err.splitlines()[:2] == [f"building {of[0]}", "none: warm-up, bytes"], "nothing is planned"
    title = " ".join(ran.out.split())  # it is folded to the width of the table
    lists = "blocks x 3, vace_blocks x 1"
    assert f"2 x 5 frames of 32 x 48, 8 tokens of text, {lists}, fp32 on cpu" in title
    cells, rows = cells_of(ran.out), found["rows"]
    assert [cells[name][4] for name in ("none", "full", "attn_only", "torch SAC, by name")] == ["8", "16", "8", "8"]
    assert {row[5] for row in cells.values()} == {"bitwise", "refused"}
    assert found["command"].startswith(f"fastac bench {of[0]} --frames 5")
    assert {"processor", "cores", "torch", "fastac"} < found["machine"].keys()
    assert (found["rounds"], found["budget"], found["reference"]) == (1, 20 * 2**10, "none")
    assert 0 < rows["planned"]["held_bytes"] - rows["full"]["held_bytes"] <= found["budget"]
    assert list(rows)[-2:] == ["full, offload", "attn_only, offload"]
    waiting = {name: row["host_bytes"] for name, row in rows.items() if not row["problem"]}
    assert waiting.pop("attn_only, offload") > waiting.pop("full, offload") > 0 == max(waiting.values())
    for name in ("full, offload", "attn_only, offload"):
        assert rows[name]["different"] == 0
        assert rows[name]["copies"] == (2 if name.startswith("full") else 4), "out and back"
        assert f"{name}: {readable_bytes(rows[name]['host_bytes'])} on the host" in ran.out.splitlines()


@pytest.mark.slow
def test_what_does_not_fit_is_not_run(command: Command, small: list[str], available: Callable[[int], None]) -> None:
    """By a plan, before the model is built; if nothing fits, sizes are named with which it does."""
    arguments = ["bench", *small, "--dtype", "fp32", "--rounds", "1", "--frames", "33"]
    available(600 * 2**10)
    ran = command(*arguments)
    cells = cells_of(ran.out)
    assert (cells["none"][-1], cells["full"][-1]) == ("does not fit", "bitwise")
    assert "none: does not fit: " in ran.out
    assert " are planned, and of 600.0 KiB available, 540.0 KiB may be used" in " ".join(ran.out.split())
    assert f"simulating {small[0]} on 33 frames" in ran.err.splitlines()
    available(250 * 2**10)
    ran = command(*arguments)
    assert (ran.status, ran.out) == (1, "")
    would_fit = "250.0 KiB available, 225.0 KiB may be used, on cpu. --layers 1 --frames 17 would fit."
    assert would_fit in ran.err.splitlines()[-1]
    assert "full: warm-up" not in ran.err


def test_what_cannot_be_measured_is_one_message(command: Command, small: list[str]) -> None:
    for options, message in (
        (["--frames", "6"], "frames 6 is not"),
        (["--json", "nowhere/bench.json"], "no folder"),
        (["--rounds", "0"], "--rounds 0"),
        (["--budget", "much"], "'much'"),
        (["--backend", "nonsense"], "--backend nonsense"),
    ):
        ran = command("bench", *small, *options)
        assert (ran.status, ran.out) == (1, ""), options
        *_, said = ran.err.splitlines()
        assert said.startswith("fastac: "), ran.err
        assert message in said, ran.err
