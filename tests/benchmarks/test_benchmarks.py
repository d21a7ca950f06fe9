"""The benchmarks run, in a reduced form, and write what their readers count on. Times are not asserted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import support

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))


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
def test_a_plan_is_as_accurate_as_promised(run: Any) -> None:
    result = run("plan_accuracy", "--pairs", "1", "--check")
    assert [row["policy"] for row in result["results"]] == ["none", "full", "long_attn_only", "attn_only", "within"]


def test_classification(run: Any) -> None:
    result = run("classification", "--calls", "1000")
    assert [row["op"] for row in result["results"]] == ["an attention op", "another op", "a higher-order op"]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "rows"), [("held_bytes", 16), ("plan_accuracy", 50)])
def test_all_rows(name: str, rows: int, run: Any) -> None:
    assert len(run(name, "--check")["results"]) == rows


@pytest.mark.soak
def test_host_time(run: Any) -> None:
    result = run("host_time", "--rounds", "2")
    for measured in result["results"].values():
        assert {"none", "full", "attn_only"} < measured.keys()
        assert measured["full"]["ratio_of_fastest"] == 1


@pytest.mark.soak
def test_region_steps(run: Any) -> None:
    for shares in run("region_steps", "--rounds", "2")["of_torch_100"].values():
        first, *_, last = shares.values()
        assert first == 100
        assert last < first


# What peers.py says of fastac and of torch, on a model of one block

OUTCOMES = {
    ("fastac attn_only", "a kernel draws, dropout follows"): "exact",
    ("fastac attn_only", "attention in small ops"): "refused",
    ("fastac attn_only", "LoRA scale reset before backward"): "refused",
    ("fastac plan", "attention in small ops"): "again, with a warning",
    ("torch SAC, FastVideo's list", "a kernel draws, dropout follows"): "silently wrong",
    ("torch SAC, FastVideo's list", "attention in small ops"): "silently again",
    ("torch full", "dropout after attention"): "exact",
    ("torch full", "LoRA scale reset before backward"): "silently wrong",
}


@pytest.fixture
def peers(benchmark: Callable[[str], Any], rows_as_before: None) -> Any:
    return benchmark("peers")


def tiny(peers: Any) -> Any:
    case = next(iter(peers.CASES.values()))
    return case._replace(latents=(1, 4, 1, 8, 8), config={"num_layers": 1})


@pytest.mark.parametrize(("way", "trap"), OUTCOMES)
def test_in_a_trap(way: str, trap: str, peers: Any) -> None:
    found, error = peers.outcomes(tiny(peers), peers.TRAPS[trap], {way: 0})[way]
    assert found == OUTCOMES[way, trap], error


def test_kernels_are_those_that_ran(peers: Any, attention_executions: Any) -> None:
    """As the kernel itself counts; and what torch's selective checkpointing answers is none."""
    kernels = {}
    for way in ("torch full", "torch SAC, FastVideo's list", "fastac attn_only"):
        step = peers.Step(tiny(peers), peers.WAYS[way])
        for _ in range(3):
            step.step()
        attention_executions.clear()
        kernels[way] = peers.executed(step), attention_executions[support.CPU_ATTENTION]
    assert list(kernels.values()) == [(4, 4), (2, 2), (2, 2)]


def test_a_peer_that_is_missing_has_a_row(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.sys.modules, "torch_remat", None)
    monkeypatch.setattr(peers, "WAYS", {name: peers.WAYS[name] for name in ("none", "torch full", "torch_remat")})
    rows = peers.measure(tiny(peers), 1)
    assert rows["torch_remat"]["problem"].startswith("ModuleNotFoundError")
    assert "problem" not in rows["torch full"]
