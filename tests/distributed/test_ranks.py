"""The harness: results in the order of ranks, errors with their traceback, an end to what hangs, and new ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks


def _sum(start: int) -> tuple[int, float, int]:
    tensor = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item(), os.getpid()


def _one(what: str) -> None:
    if dist.get_rank() == 1:
        if what == "hangs":
            time.sleep(60)
        if what == "leaves":
            os._exit(7)
        raise ValueError("this rank's own")
    if what == "raises":
        dist.all_reduce(torch.ones(1))


def test_ranks_stay_until_one_raises() -> None:
    first, again = ranks.run(_sum, 3), ranks.run(_sum, 4)
    assert [rank[:2] for rank in first] == [(0, 7.0), (1, 7.0)]
    assert [rank[:2] for rank in again] == [(0, 9.0), (1, 9.0)]
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*ValueError: this rank's own"):
        ranks.run(_one, "raises alone")
    new = ranks.run(_sum, 3)
    processes = [{rank[2] for rank in found} for found in (first, again, new)]
    assert processes[0] == processes[1]
    assert not processes[0] & processes[2]


@pytest.mark.parametrize(
    ("what", "said"),
    [("raises", "ValueError: this rank's own"), ("leaves", "exit code 7"), ("hangs", "not done after")],
)
def test_every_end_of_a_rank_is_reported(what: str, said: str) -> None:
    first, second = ranks.outcomes(_one, what, timeout=2, patience=4)
    assert said in second.error
    assert ("RuntimeError" in first.error) == (what == "raises"), first.error
    with pytest.raises(AssertionError, match=said):
        ranks.results([second])
