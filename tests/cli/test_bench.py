"""fastac bench, from Python: what is counted and compared is exact, and what is timed has a clock of its own here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import fastac
from fastac import benching, hook, machine, measuring, models, shares
from fastac.benching import VARIANTS, Workload, bench, by_name
from fastac.errors import FastacError
from fastac.measurements import Measurements
from fastac.models import configurations
from fastac.policy import Policy

WAN = models.MODELS["WanTransformer3DModel"]
NAMES = ["none", "full", "attn_only", "long_attn_only", "budget", "torch SAC, by name"]

Way = Callable[[Any, int | None], None]


def tiny_wan() -> Workload:
    return Workload(*models.tiny_model(WAN))


class TimedByItsWay(Workload):
    """A workload whose steps take as long, by a clock of its own, as the way that is switched on should."""

    now = 0.0

    def step(self) -> None:
        super().step()
        setting = hook.setting_of(self.model)
        if setting is not None:
            self.now += {"attn_only": 6.0, "long_attn_only": 8.0}.get(str(setting.policy), 7.0)
        else:
            self.now += 10.0 if self.model.is_gradient_checkpointing else 4.0


@pytest.fixture(scope="module")
def measured() -> Measurements:
    workload = TimedByItsWay(*models.tiny_model(WAN))
    return bench(workload, "tiny Wan", rounds=3, clock=lambda: workload.now)


def rows_of(found: Measurements) -> dict[str, Any]:
    return {row.variant: row for row in found.rows}


def test_every_way_is_measured(measured: Measurements) -> None:
    assert [row.variant for row in measured.rows] == NAMES
    assert not any(row.problem for row in measured.rows)


def test_attention_kernels_are_counted(measured: Measurements) -> None:
    """Two blocks with two calls each. A budget chooses among attention and products, so it may run some again."""
    attention = {name: row.attention for name, row in rows_of(measured).items()}
    assert 4 <= attention.pop("budget") <= 8
    assert attention == {"none": 4, "full": 8, "attn_only": 4, "long_attn_only": 8, "torch SAC, by name": 4}


def test_held_bytes(measured: Measurements) -> None:
    rows = rows_of(measured)
    none, full, saved = rows["none"], rows["full"], rows["attn_only"]
    assert none.held_bytes > saved.held_bytes > full.held_bytes == rows["long_attn_only"].held_bytes
    assert saved.held_bytes - full.held_bytes == measured.budget == 52 * 2**10, "what fastac.report says is saved"
    assert 0 < rows["budget"].held_bytes - full.held_bytes <= measured.budget
    assert none.peak_bytes > saved.peak_bytes > full.peak_bytes > saved.held_bytes


def test_outputs_and_gradients_are_compared(measured: Measurements) -> None:
    assert (measured.reference, measured.noise) == ("none", 0.0)
    model = tiny_wan().model
    for row in measured.rows:
        assert row.compared == 1 + len(list(model.parameters())) + 2, "an output, the gradients of weights and inputs"
        assert (row.different, row.largest_difference) == (0, 0.0)


def test_each_way_runs_under_its_own_checkpointing(measured: Measurements) -> None:
    """In every round: its clock knows which one is on."""
    rows = rows_of(measured)
    assert {name: row.seconds for name, row in rows.items()} == {
        "none": (4.0,) * 3,
        "full": (10.0,) * 3,
        "attn_only": (6.0,) * 3,
        "long_attn_only": (8.0,) * 3,
        "budget": (7.0,) * 3,
        "torch SAC, by name": (10.0,) * 3,
    }
    assert [rows[name].relative for name in NAMES] == [0.4, 1.0, 0.6, 0.8, 0.7, 1.0]


def test_the_table_and_the_json(measured: Measurements) -> None:
    table = str(measured)
    lines = {
        cells[0]: cells[1:] for line in table.splitlines() if (cells := [c.strip() for c in line.split("│")[1:-1]])
    }
    assert list(lines) == NAMES
    assert lines["attn_only"][:2] == ["0.600", "6 (6 - 6)"]
    assert lines["attn_only"][4:] == ["4", "bitwise"]
    assert lines["attn_only"][2] == fastac.reporting.readable_bytes(rows_of(measured)["attn_only"].held_bytes)
    assert "budget: 52.0 KiB" in table
    again = json.loads(json.dumps(measured.as_json()))
    assert [row["attention"] for row in again["rows"]] == [row.attention for row in measured.rows]
    assert again["rows"][1]["seconds"] == [10.0, 10.0, 10.0]


def of_ways(monkeypatch: pytest.MonkeyPatch, **ways: Way) -> Measurements:
    monkeypatch.setattr(benching, "VARIANTS", {"none": VARIANTS["none"], **ways, "full": VARIANTS["full"]})
    return bench(tiny_wan(), "tiny Wan", rounds=1, clock=itertools.count().__next__)


def raising(error: Exception) -> Way:
    def enable(model: Any, limit: int | None) -> None:
        raise error

    return enable


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (FastacError("attn_only: backend 'x' is decomposed\nmore"), "refused: attn_only: backend 'x' is decomposed"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"), "out of memory"),
        pytest.param(
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            "out of memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RuntimeError("an op was changed in place"), "failed: an op was changed in place", marks=pytest.mark.slow
        ),
    ],
)
def test_what_does_not_run_becomes_a_row(error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_ways(monkeypatch, attn_only=raising(error))
    assert [row.problem for row in found.rows] == ["", problem, ""]
    assert [row.attention for row in found.rows] == [4, 0, 8]
    assert found.rows[2].relative == 1.0
    assert f"│ {problem.partition(': ')[0]} " in str(found)
    assert (f"attn_only: {problem}" in str(found)) == (": " in problem), "the rest of it is told below the table"


def test_what_runs_out_of_memory_later_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round, when its bytes were measured already."""
    real, first = benching.Switch.to, itertools.count()

    def to(self: benching.Switch, name: str) -> None:
        real(self, name)
        if name == "none" and next(first) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benching.Switch, "to", to)
    monkeypatch.setattr(benching, "VARIANTS", {name: VARIANTS[name] for name in ("none", "full")})
    found = bench(tiny_wan(), "tiny Wan", rounds=3, clock=itertools.count().__next__)
    assert [(row.problem, len(row.seconds)) for row in found.rows] == [("out of memory", 0), ("", 3)]


def test_a_mistake_of_fastacs_own_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        of_ways(monkeypatch, attn_only=raising(TypeError("a mistake")))


def test_without_a_reference_the_first_that_runs_is_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "VARIANTS", {"none": raising(torch.OutOfMemoryError("")), "full": VARIANTS["full"]})
    found = bench(tiny_wan(), "tiny Wan", rounds=1)
    assert found.reference == "full"
    assert "outputs and gradients as full" in str(found)


def test_nothing_that_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "VARIANTS", {"none": raising(RuntimeError("no backward here"))})
    with pytest.raises(FastacError, match="no step could be run here: failed: no backward here"):
        bench(tiny_wan(), "tiny Wan")


def test_another_gradient_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, limit: int | None) -> None:
        model.enable_gradient_checkpointing(lambda block, *args: block(*(arg * 2 for arg in args[:1]), *args[1:]))

    found = of_ways(monkeypatch, wrong=wrong)
    row = found.rows[1]
    assert 0 < row.different <= row.compared
    assert row.largest_difference > 0
    assert f"{row.different} of {row.compared} differ, by up to " in str(found)
    assert (found.rows[2].different, found.noise) == (0, 0.0)


def test_kernels_that_are_not_deterministic_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, steps = tiny_wan(), itertools.count()
    workload.model.proj_out.register_forward_hook(lambda module, args, output: output + next(steps))
    monkeypatch.setattr(benching, "VARIANTS", {"none": VARIANTS["none"]})
    found = bench(workload, "tiny Wan", rounds=1)
    assert found.noise >= 1
    assert "two runs of none differ by up to" in str(found)


def test_a_budget_of_ones_own() -> None:
    switch = benching.Switch(tiny_wan(), 20_000)
    switch.first("attn_only")
    switch.first("budget")
    assert switch.limit == 20_000
    assert not benching._waits(switch.workload.model), "a step of it is what it will be in every round"
    assert 0 < sum(row.saved_bytes + row.linear_bytes for row in fastac.report(switch.workload.model).rows) <= 20_000


def test_a_budget_that_is_not_known_is_refused() -> None:
    switch = benching.Switch(tiny_wan())
    with pytest.raises(FastacError, match="--budget"):
        switch.first("budget")


def test_a_budget_that_is_never_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "decided", lambda policy: None)
    switch = benching.Switch(tiny_wan(), 20_000)
    with pytest.raises(FastacError, match="was not shared out in 2 steps"):
        switch.first("budget")


def test_the_model_is_left_plain() -> None:
    workload = tiny_wan()
    fastac.enable(workload.model, Policy("attn_only", 7))
    found = bench(workload, "tiny Wan", rounds=1)
    assert [row.problem for row in found.rows] == [""] * len(NAMES), "whatever the model came with"
    assert not workload.model.is_gradient_checkpointing
    assert hook.setting_of(workload.model) is None
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_every_step_begins_with_the_same_random_state() -> None:
    workload = Workload(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout()), {"input": torch.ones(2, 64)})
    assert torch.equal(workload.forward(), workload.forward())


def test_a_policy_by_name_knows_only_names() -> None:
    """That is what people write; it misses flash-attn's."""
    assert by_name(None, "aten._scaled_dot_product_flash_attention.default") is CheckpointPolicy.MUST_SAVE
    assert by_name(None, "flash_attn._flash_attn_forward.default") is CheckpointPolicy.PREFER_RECOMPUTE


def test_ways_take_turns() -> None:
    """In every round each way once, in several orders; the time of a switch is nobody's."""
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


def test_times_are_compared_within_a_round() -> None:
    """Another median than that of the medians: which is 0.75."""
    seconds = {"full": [1.0, 10.0, 4.0], "attn_only": [2.0, 3.0, 4.0]}
    assert measuring.relative(seconds, "full") == {"full": 1.0, "attn_only": 1.0}
    assert measuring.relative({"attn_only": [1.0]}, "full") == {}


def test_bytes_are_those_of_the_allocator() -> None:
    def run() -> torch.Tensor:
        torch.empty(1_000_000)
        return torch.empty(1000)

    assert measuring.allocated_bytes(run) == (4000, 4_000_000)
    assert measuring.allocated_bytes(run, lambda result: torch.empty(2_000_000)) == (4000, 8_004_000)


def test_collecting_goes_on_afterwards() -> None:
    import gc

    measuring.take_turns(["a"], 1, lambda name: None, lambda: None)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_facts_of_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = machine.facts()
    assert {"processor", "cores", "load_average", "threads", "system", "python"} < facts.keys()
    assert (facts["torch"], "gpu" in facts) == (torch.__version__, torch.cuda.is_available())

    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 570.86.15\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=85 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = machine.facts()["gpu"]
    assert {name: gpu[name] for name in ("name", "memory_bytes", "capability", "driver", "cuda")} == {
        "name": "NVIDIA H100",
        "memory_bytes": 85 * 10**9,
        "capability": "9.0",
        "driver": "570.86.15",
        "cuda": "13.0",
    }
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.gpu()["driver"] is None


def test_a_distribution_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine.importlib.metadata.version

    def version(name: str) -> str:
        if name == "fastac":
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    facts = machine.facts()
    assert (facts["fastac"], facts["torch"]) == (None, torch.__version__)


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("wan2.1-t2v-1.3b", {"num_layers": 7}),
        ("hunyuanvideo", {"num_layers": 7, "num_single_layers": 7}),
        ("WanVACETransformer3DModel", {"num_layers": 7, "vace_layers": [0, 5]}),
        ("Kandinsky5Transformer3DModel", {"num_visual_blocks": 7}),
    ],
)
def test_fewer_layers(name: str, fewer: dict[str, Any]) -> None:
    """Of every list of blocks that has more; and of nothing else, such as text refiners."""
    found = configurations.load(name)
    config = configurations.with_layers(found.config, 7)
    assert {key: value for key, value in config.items() if value != found.config[key]} == fewer
