"""The harness: results in the order of ranks, errors with their traceback, and new ranks after one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks


def _sum(start: int) -> tuple[int, float, int]:
    tensor = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item(), os.getpid()


def _raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank's own")


def test_ranks_stay_until_one_raises() -> None:
    first, again = ranks.run(_sum, 3), ranks.run(_sum, 4)
    assert [rank[:2] for rank in first] == [(0, 7.0), (1, 7.0)]
    assert [rank[:2] for rank in again] == [(0, 9.0), (1, 9.0)]
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*ValueError: this rank's own"):
        ranks.run(_raises_on_one)
    new = ranks.run(_sum, 3)
    processes = [{rank[2] for rank in found} for found in (first, again, new)]
    assert processes[0] == processes[1]
    assert not processes[0] & processes[2]
