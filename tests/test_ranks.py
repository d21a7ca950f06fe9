"""What is known of several processes without any: names of classes, errors of one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.algorithms.join import Joinable

import fastac
from fastac import errors
from fastac.engine import ranks


class Block(torch.nn.Module):
    pass


def test_a_class_that_an_engine_made_has_the_name_of_its_own() -> None:
    """As fully_shard and replicate make them, of theirs and of one another's."""
    engine = type("FSDPModule", (), {})
    sharded = type("FSDPBlock", (engine, Block), {})
    assert [ranks.class_name(one) for one in (Block, Block(), sharded, sharded())] == ["Block"] * 4
    other = type("ReplicateModule", (), {})
    assert ranks.class_name(type("ReplicateFSDPBlock", (other, sharded), {})) == "Block"


def test_a_class_of_two_parents_has_its_own_name() -> None:
    class Net(Joinable, torch.nn.Module):
        pass

    class FSDPNet(Net):
        pass

    assert [ranks.class_name(one) for one in (Net, FSDPNet)] == ["Net", "FSDPNet"]


def test_one_process_has_no_name() -> None:
    assert (ranks.count(), ranks.name()) == (1, "")
    assert str(fastac.FastacError("what was seen")) == "what was seen"


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", ["FastacError", "PolicyNotAppliedError", "CompiledPolicyNotAppliedError"])
def test_an_error_keeps_the_rank_it_was_raised_on(kind: str, again: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "name", lambda: "rank 1 of 2")
    error = getattr(errors, kind)("what was seen")
    monkeypatch.undo()
    other = again(error)  # type: ignore[operator]
    assert type(other) is type(error)
    assert str(other) == str(error) == "rank 1 of 2: what was seen"


def test_together_of_one_process_runs_alone() -> None:
    together = ranks.Together()
    assert together.run(lambda: (together.any(True), together.any(False), together.agree(3))) == (True, False, True)
