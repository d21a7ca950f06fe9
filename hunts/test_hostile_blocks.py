"""Thousands of random hostile programs, exact or refused: hunts/hostile_blocks.py says what they are.

`python -m pytest -m soak -rP hunts/test_hostile_blocks.py` prints what came of how many.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from hunts import hostile_blocks
from hunts.hostile_blocks import KNOWN, ORDERED, WRITTEN, Program, check, shortest
from hunts.hostile_lines import KERNELS, W, kernel

pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAMS, CHUNK = 4000, 200
SAMPLES = range(PROGRAMS, PROGRAMS + 20), range(ORDERED + PROGRAMS, ORDERED + PROGRAMS + 15)
LIMITS = Path(__file__).parents[1] / "docs" / "limits.md"


def run(seeds: range) -> None:
    counts, failed = hostile_blocks.count(seeds)
    print(hostile_blocks.table(counts))
    assert not failed, "\n\n".join(map(hostile_blocks.show, failed[:3]))
    assert counts["exact", ""] > len(seeds) / 4, "programs that raise, or that are refused, show little"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [*range(0, PROGRAMS, CHUNK), *range(ORDERED, ORDERED + PROGRAMS, CHUNK)])
def test_programs(first: int) -> None:
    run(range(first, first + CHUNK))


@pytest.mark.parametrize("sample", SAMPLES, ids=["lines at random", "buffers in any order"])
def test_a_sample(sample: range) -> None:
    run(sample)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checkpoint writes buffers twice."""

    def checkpoint(function: Any, *args: Any, policy: Any) -> Any:
        return torch_checkpoint(function, *args, use_reentrant=False)

    monkeypatch.setattr(fastac, "checkpoint", checkpoint)
    counts = "self.count += 1  # init: self.register_buffer('count', torch.zeros(3))"
    needed = {
        "forward": [counts, "a = a.sin()", "return a"],
        "use": ["x, y, z = run.leaves(6)", "out = run.checkpoint(block, x, y)", "run.loss(out).backward()"],
    }
    more = {"forward": ["b = a.exp()", *needed["forward"]], "use": [*needed["use"], "run.optimize()"]}
    program = Program(0, "float32", '"full"', {}, more)
    assert check(program) == ("failure", "buffer 0.count; torch's own checkpoint is not exact, either: buffer 0.count")
    assert shortest(program).bodies == needed


@pytest.mark.parametrize("words", [*KNOWN, WRITTEN])
def test_what_is_known_is_documented(words: str) -> None:
    text = re.sub(r"[\s*]+", " ", LIMITS.read_text(encoding="utf-8"))
    assert words in text


@pytest.mark.parametrize("kind", KERNELS)
def test_a_hostile_kernel_runs(kind: str) -> None:
    """Else programs with it would raise in any case, which shows nothing."""
    for count in range(4):
        tensors = [torch.randn(2, 4, W, requires_grad=True) * 1 for _ in range(3)]
        kernel(kind, *tensors, count).sum().backward()
