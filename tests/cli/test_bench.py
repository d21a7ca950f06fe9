"""fastac bench: what is counted and compared is exact, and what is timed has a clock of its own here."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac import cli
from fastac.cli import measuring
from fastac.cli.measuring import VARIANTS, Measurements, Ways, Workload, bench
from fastac.engine import offload, region
from fastac.errors import FastacError, readable_bytes
from fastac.models import published as configurations
from tests import support
from tests.support import cells_of

NAMES = ["none", "full", "attn_only", "long_attn_only", "planned", "auto", "torch SAC, by name"]


def tiny_wan() -> Workload:
    return Workload(*support.build("WanTransformer3DModel"))


def clocked(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    patch.setattr(measuring, "take_turns", functools.partial(measuring.take_turns, clock=clock))


def rows_of(found: Measurements) -> dict[str, Any]:
    return {row.variant: row for row in found.rows}


def test_every_way_is_measured() -> None:
    """Two blocks with two attention calls each, in steps that take as long as the way that is switched on should."""
    workload, to, on = tiny_wan(), Ways.to, [""]

    def noted(switch: Ways, name: str) -> None:
        on.append(name)
        to(switch, name)

    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ways, "to", noted)
        clocked(patch, lambda: next(clock) % 2 * (1.0 + NAMES.index(on[-1])))
        measured = bench(workload, "tiny Wan", rounds=3)
    rows = rows_of(measured)
    assert list(rows) == NAMES
    assert [row.variant for row in measured.rows if row.problem] == ["long_attn_only"], "no attention is long here"
    attention = {name: row.attention for name, row in rows.items() if not row.problem}
    assert 4 <= attention.pop("planned") <= 8
    assert attention == {"none": 4, "full": 8, "attn_only": 4, "auto": 4, "torch SAC, by name": 4}
    assert [rows[name].relative for name in ("none", "full", "attn_only")] == [0.5, 1.0, 1.5]
    assert (measured.reference, measured.noise) == ("none", 0.0)
    for row in (row for row in measured.rows if not row.problem):
        assert row.compared > len(list(workload.model.parameters()))
        assert (row.different, row.largest_difference) == (0, 0.0)

    none, full, saved = rows["none"], rows["full"], rows["attn_only"]
    assert none.held_bytes > saved.held_bytes > full.held_bytes
    assert saved.held_bytes - full.held_bytes == measured.budget == 52 * 2**10, "what fastac.report says is saved"
    assert 0 < rows["planned"].held_bytes - full.held_bytes <= measured.budget
    assert none.peak_bytes > saved.peak_bytes > full.peak_bytes > saved.held_bytes

    assert rows["auto"].held_bytes == none.held_bytes
    assert (none.chosen, rows["auto"].chosen.partition(";")[0]) == ("", "no checkpointing")
    assert "auto: no checkpointing; " in str(measured)

    cells = cells_of(str(measured))
    assert list(cells) == NAMES
    assert cells["attn_only"][:2] == ["1.500", "3 (3-3)"]
    assert cells["attn_only"][4:] == ["4", "bitwise"]
    assert "budget: 52.0 KiB" in str(measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS")
        narrow = str(measured)
    assert 70 < max(map(len, narrow.splitlines())) <= 80, narrow
    assert {"long_attn_only", "planned"} < set(cells_of(narrow)), "names are broken between words"


def test_no_values_are_compared_in_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(region, "fingerprint", seen.append)
    switch = Ways(tiny_wan())
    switch.to("attn_only")
    assert seen
    seen.clear()
    for _ in range(3):
        switch.workload.step()
    assert not seen


def test_auto_is_timed_under_a_plan_that_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may plan again before the third step. It plans once, for what the machine has besides the weights."""
    available, steps, step = 3_000_000, [0], Workload.step

    def counted(workload: Workload) -> None:
        steps[0] += 1
        step(workload)

    monkeypatch.setattr("fastac.engine.host_memory.available", lambda: available)
    monkeypatch.setattr(Workload, "step", counted)
    workload = tiny_wan()
    switch = Ways(workload)
    switch.to("auto")
    assert steps == [3]
    chosen = switch.chosen
    switch.to("auto")
    assert (steps, switch.chosen) == ([4], chosen)
    auto = switch.planner.auto
    assert (auto.memory, auto.host, auto.optimizer) == (available * 9 // 10 + workload.weights, 0, "sgd")
    assert Ways(workload, offload=True).planner.auto.host is None


NONE, FULL = VARIANTS["none"], VARIANTS["full"]


def test_ways_that_do_not_run_and_ways_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """They become rows; the first way that runs is the reference."""

    def of_ways(**ways: Any) -> Measurements:
        monkeypatch.setattr(measuring, "VARIANTS", ways)
        return bench(tiny_wan(), "tiny Wan", rounds=1)

    def raising(*errors: Exception | None) -> Callable[[Ways], object]:
        left = list(errors)

        def enable(switch: Ways) -> None:
            if error := left.pop(0):
                raise error

        return enable

    def wrong(switch: Ways) -> None:
        model = switch.workload.model
        model.enable_gradient_checkpointing(lambda block, *args: block(*(arg * 2 for arg in args[:1]), *args[1:]))

    clocked(monkeypatch, itertools.count().__next__)
    found = of_ways(
        refused=raising(FastacError("backend 'x' is decomposed\nmore")),
        large=raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")),
        large_on_a_cpu=raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        broken=raising(RuntimeError("an op was changed in place")),
        late=raising(None, *[torch.OutOfMemoryError("CUDA out of memory")] * 2),
        full=FULL,
        wrong=wrong,
    )
    refused, failed = "refused: backend 'x' is decomposed", "failed: an op was changed in place"
    memory = "out of memory"
    assert [row.problem for row in found.rows] == [refused, memory, memory, failed, memory, "", ""]
    assert (found.reference, rows_of(found)["full"].relative) == ("late", 1.0)
    assert f"refused: {refused}" in str(found), "the rest of it stands below the table"
    row = found.rows[-1]
    assert 0 < row.different <= row.compared
    assert row.largest_difference > 0
    assert f"{row.different} of {row.compared} differ, by up to " in str(found)
    with pytest.raises(TypeError):  # a mistake of fastac's own is no row
        of_ways(none=raising(TypeError("a mistake")))
    with pytest.raises(FastacError, match="no step could be run here: failed: no backward here"):
        of_ways(none=raising(RuntimeError("no backward here")))


def test_kernels_that_are_not_deterministic_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, steps = tiny_wan(), itertools.count()
    workload.model.proj_out.register_forward_hook(lambda module, args, output: output + next(steps))
    monkeypatch.setattr(measuring, "VARIANTS", {"none": NONE})
    assert bench(workload, "tiny Wan", rounds=1).noise > 0.5


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bytes of a CPU stay, where there is a device beside it")
def test_what_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is held as well: no more and no less is than without offload."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    monkeypatch.setattr(measuring, "VARIANTS", {"full": FULL, "attn_only": VARIANTS["attn_only"]})
    clocked(monkeypatch, itertools.count().__next__)
    found = bench(Workload(*support.build("WanTransformer3DModel", num_layers=4)), "tiny Wan", rounds=1, offload=True)
    rows = rows_of(found)
    assert list(rows) == ["full", "attn_only", "full, offload", "attn_only, offload"]
    saved, offloaded = rows["attn_only"], rows["attn_only, offload"]
    assert offloaded.held_bytes == saved.held_bytes
    assert offloaded.held_bytes > offloaded.host_bytes > rows["full, offload"].host_bytes > 0 == saved.host_bytes
    assert (offloaded.copies, offloaded.waited_bytes, offloaded.different) == (4, (), 0), "two blocks, out and back"
    waiting = f"attn_only, offload: {readable_bytes(offloaded.host_bytes)} on the host"
    assert waiting in str(found).splitlines()
    gpu = dataclasses.replace(found, device="cuda", rows=(dataclasses.replace(offloaded, waited_bytes=(1024,)),))
    assert f"{waiting}, 1 of 4 copies waited for (1.0 KiB)" in str(gpu).splitlines()


def test_a_budget_of_ones_own_on_a_model_that_is_left_plain() -> None:
    workload = tiny_wan()
    fastac.enable(workload.model, "attn_only")
    switch = Ways(workload, 20_000)
    switch.to("planned")
    workload.step()
    assert 0 < sum(row.saved_bytes + row.linear_bytes for row in fastac.report(workload.model).rows) <= 20_000
    switch.off()
    assert not workload.model.is_gradient_checkpointing
    assert all(parameter.grad is None for parameter in workload.model.parameters())


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


def test_bytes_are_those_of_the_allocator() -> None:
    def run() -> torch.Tensor:
        torch.empty(1_000_000)
        return torch.empty(1000)

    assert measuring.allocated_bytes(run) == (4000, 4_000_000)
    assert measuring.allocated_bytes(run, lambda result: torch.empty(2_000_000)) == (4000, 8_004_000)


# The command


def test_a_configuration_and_a_video(small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    command = ["bench", *small, "--dtype", "fp32", "--rounds", "1", "--layers", "2", "--batch", "2", "--offload"]
    assert cli.main([*command, "--budget", "20KiB", "--json", str(written)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[:2] == [f"building {small[0]}", "none: warm-up, bytes"], "nothing is planned"
    title = " ".join(captured.out.split())  # it is folded to the width of the table
    assert "2 x 5 frames of 32 x 48, 8 tokens of text, blocks x 2, fp32 on cpu" in title
    cells = cells_of(captured.out)
    assert [cells[name][4] for name in ("none", "full", "attn_only", "torch SAC, by name")] == ["4", "8", "4", "4"]
    assert {row[5] for row in cells.values()} == {"bitwise", "refused"}
    assert "full, offload: 0 B on the host" in captured.out.splitlines()
    found = json.loads(written.read_text())
    assert found["command"].startswith(f"fastac bench {small[0]} --frames 5")
    assert {"processor", "cores", "torch", "fastac"} < found["machine"].keys()
    assert (found["rounds"], found["budget"], found["reference"]) == (1, 20 * 2**10, "none")


def test_what_does_not_fit_is_not_run(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a plan, before the model is built; if nothing fits, sizes are named with which it does."""
    command = ["bench", *small, "--dtype", "fp32", "--rounds", "1", "--frames", "33"]
    monkeypatch.setattr(measuring, "VARIANTS", {name: VARIANTS[name] for name in ("none", "full")})
    monkeypatch.setattr("fastac.engine.host_memory.available", lambda: 600 * 2**10)
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    cells = cells_of(captured.out)
    assert (cells["none"][-1], cells["full"][-1]) == ("does not fit", "bitwise")
    assert "none: does not fit: " in captured.out
    assert " are planned, and of 600.0 KiB available, 540.0 KiB may be used" in " ".join(captured.out.split())
    assert f"simulating {small[0]} on 33 frames" in captured.err.splitlines()

    monkeypatch.setattr("fastac.engine.host_memory.available", lambda: 250 * 2**10)
    assert cli.main(command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        "250.0 KiB available, 225.0 KiB may be used, on cpu. --layers 1 --frames 17 would fit."
        in captured.err.splitlines()[-1]
    )
    assert "full: warm-up" not in captured.err


def test_what_cannot_be_measured_is_one_message(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--frames", "6"], "frames 6 is not"),
        (["--json", "nowhere/bench.json"], "no folder"),
        (["--rounds", "0"], "--rounds 0"),
        (["--budget", "much"], "'much'"),
        (["--backend", "nonsense"], "--backend nonsense"),
    ):
        assert cli.main(["bench", *small, *options]) == 1, options
        captured = capsys.readouterr()
        assert captured.out == "", options
        *_, said = captured.err.splitlines()
        assert said.startswith("fastac: "), captured.err
        assert message in said, captured.err


def test_fewer_layers() -> None:
    """Of every list of blocks that has more; and of nothing else, such as text refiners."""
    for name, fewer in (
        ("hunyuanvideo", {"num_layers": 7, "num_single_layers": 7}),
        ("WanVACETransformer3DModel", {"num_layers": 7, "vace_layers": [0, 5]}),
    ):
        found = configurations.load_configuration(name)
        config = configurations.with_layers(found.config, 7)
        assert {key: value for key, value in config.items() if value != found.config[key]} == fewer
