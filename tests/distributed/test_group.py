"""Several processes: the rank of an error, and a failure on one rank that is one on all."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fastac
from fastac import errors
from fastac.engine.ranks import Group
from fastac.models import row_of
from tests.distributed import ranks
from tests.ways.recipes import WAN, build


def _catalogued() -> tuple[str, bool]:
    model, _ = build(WAN)
    plain = row_of(model)
    fully_shard(model)
    return type(model).__name__, row_of(model) is plain is not None


def test_a_sharded_model_is_known_in_the_catalogue() -> None:
    assert ranks.run(_catalogued) == [(f"FSDP{WAN}", True)] * 2


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_keeps_the_rank_it_was_raised_on(again: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "rank", lambda: "rank 1 of 2")
    error = fastac.PolicyNotAppliedError("what was seen")
    monkeypatch.undo()
    other = again(error)  # type: ignore[operator]
    assert type(other) is type(error)
    assert str(other) == str(error) == "rank 1 of 2: what was seen"


def _in_a_group() -> list[object]:
    """What is found together, and what each raises where rank 1 does."""
    rank, groups = dist.get_rank(), len(dist.distributed_c10d._world.pg_map)
    group = Group()
    found: list[object] = group.run(
        lambda: [group.any(rank == 1), group.any(False), group.agree(rank), group.agree("same")]
    )

    def fail() -> None:
        if rank == 1:
            raise ValueError("this rank's own")
        group.any(True)

    group = Group()
    try:
        group.run(fail)
    except Exception as error:
        found += [type(error).__name__, str(error)]
    return [*found, len(dist.distributed_c10d._world.pg_map) - groups]


def test_a_group_raises_on_all_when_one_raises() -> None:
    first, second = ranks.run(_in_a_group)
    agreed = [True, False, False, True]
    assert first == [*agreed, "OtherRankFailed", "rank 1 of 2: ValueError: this rank's own", 0]
    assert second == [*agreed, "ValueError", "this rank's own", 0]
