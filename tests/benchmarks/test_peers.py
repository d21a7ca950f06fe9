"""What benchmarks/peers.py says of fastac and of torch, on a model of one block. Times are not asserted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import support

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
