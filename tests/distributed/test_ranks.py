"""The harness itself: results in the order of ranks, errors with their traceback, an end to what hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks


def _sum(start: int) -> tuple[int, float]:
    tensor = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def test_results(tmp_path: Path) -> None:
    assert ranks.run(tmp_path, _sum, 3, world=3) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank's own")
    dist.all_reduce(torch.ones(1))


def test_errors(tmp_path: Path) -> None:
    first, second = ranks.outcomes(tmp_path, _one_fails, timeout=5)
    assert "ValueError: this rank's own" in second.error
    assert "RuntimeError" in first.error
    assert first.seconds < 15


def _one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    first, second = ranks.outcomes(tmp_path, _one_hangs, patience=3)
    assert second.error == "not done after 3 s"
    assert not first.error or "not done" in first.error


def _one_leaves() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_one_that_is_gone(tmp_path: Path) -> None:
    _, second = ranks.outcomes(tmp_path, _one_leaves, timeout=2)
    assert (second.exit_code, second.told) == (7, False)


def test_one_that_is_gone_without_a_word_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 ended with exit code 7, before it told its result"):
        ranks.run(tmp_path, _one_leaves, timeout=2)
