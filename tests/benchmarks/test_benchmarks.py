"""The benchmarks run, in a reduced form, and write what their readers count on. Times are not asserted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark with options, and reads what it wrote."""

    def run(name: str, *options: str) -> dict[str, Any]:
        output, threads = tmp_path / "new" / "result.json", torch.get_num_threads()
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, "--output", str(output)])
        try:
            assert benchmark(name).main() == 0
        finally:
            torch.set_num_threads(threads)
        result: dict[str, Any] = json.loads(output.read_text())
        assert result["command"].startswith(f"python benchmarks/{name}.py")
        assert {"processor", "cores", "threads", "python", "torch", "diffusers", "fastac"} <= result["machine"].keys()
        return result

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_can_be_imported(name: str, benchmark: Callable[[str], Any]) -> None:
    module = benchmark(name)
    assert module.__doc__
    assert name == "common" or callable(module.main)


def test_held_bytes_are_the_least(benchmark: Callable[[str], Any]) -> None:
    held_bytes = benchmark("held_bytes")
    rows = [held_bytes.measure(held_bytes.CASES[0], policy, 1, torch.float32) for policy in ("none", "attn_only")]
    assert not any(row.is_off() for row in rows)
    assert rows[1].held_by_blocks == rows[1].least < rows[0].held_by_blocks


@pytest.mark.slow
def test_a_plan_is_as_accurate_as_promised(run: Run) -> None:
    result = run("plan_accuracy", "--pairs", "1", "--check")
    assert [row["policy"] for row in result["results"]] == ["none", "full", "long_attn_only", "attn_only", "within"]


def test_classification(run: Run) -> None:
    result = run("classification", "--calls", "1000")
    assert [row["op"] for row in result["results"]] == ["an attention op", "another op", "a higher-order op"]


@pytest.mark.soak
def test_all_held_bytes(run: Run) -> None:
    assert len(run("held_bytes", "--check")["results"]) == 16


@pytest.mark.soak
def test_all_plans(run: Run) -> None:
    assert len(run("plan_accuracy", "--check")["results"]) == 50


@pytest.mark.soak
def test_host_time(run: Run) -> None:
    result = run("host_time", "--rounds", "2")
    for measured in result["results"].values():
        assert {"none", "full", "attn_only"} < measured.keys()
        assert measured["full"]["ratio_of_fastest"] == 1


@pytest.mark.soak
def test_region_steps(run: Run) -> None:
    for shares in run("region_steps", "--rounds", "2")["of_torch_100"].values():
        first, *_, last = shares.values()
        assert first == 100
        assert last < first
