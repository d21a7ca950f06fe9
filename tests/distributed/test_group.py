"""Several processes: the rank of an error, and a failure on one rank that is one on all."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch.distributed.fsdp import fully_shard

import fastac
from fastac import errors
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
