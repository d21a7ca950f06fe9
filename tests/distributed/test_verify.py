"""On several ranks, fastac.verify holds on all or fails on all, and all take the same steps. Errors name their rank."""

from __future__ import annotations

import copy
import datetime as dt
import itertools
import os
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import fastac
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, sharded, sharded_inside, ulysses, ulysses_stack
from tests.support import loss_of, stack, stack_inputs
from tests.ways.recipes import WAN, build

WRAPPERS = {"fsdp2": sharded, "ddp": DistributedDataParallel}


def _verify(kind: str, per_block: bool = False) -> tuple[Any, ...]:
    if kind == "ulysses":
        found = fastac.verify(ulysses_stack(), blocks="blocks", **part_of_inputs())
    else:
        model, batch = build(WAN)
        model = WRAPPERS[kind](model)
        found = fastac.verify(model, per_block=per_block, **batch)
    return found.compared > 20, found.different, found.policy_executions, found.saved


@pytest.mark.parametrize(("kind", "per_block"), [("fsdp2", False), ("fsdp2", True), ("ddp", False), ("ulysses", False)])
def test_it_holds(kind: str, per_block: bool) -> None:
    assert ranks.run(_verify, kind, per_block) == [(True, (), (4, 0), 4)] * 2


def _verify_noisy() -> float:
    """On rank 1 the output is another in every call, as of kernels that are not deterministic."""
    model, calls = ulysses_stack(), itertools.count(1)
    if dist.get_rank() == 1:  # of it, other ranks get nothing
        model.register_forward_hook(lambda module, args, output: output + 1e-6 * (next(calls) % 7))
    return fastac.verify(model, blocks="blocks", **part_of_inputs()).noise


def test_every_rank_takes_the_same_steps() -> None:
    """If one rank sees a difference, all run the step that measures the noise."""
    quiet, noise = ranks.run(_verify_noisy)
    assert (quiet, noise > 0) == (0.0, True)


class Refusing(torch.autograd.Function):
    """Its backward is not deterministic, and raises if it should be."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if torch.get_deterministic_debug_mode() == 2:
            raise RuntimeError("refusing_cuda does not have a deterministic implementation")
        return gradient * (1 + 1e-6 * torch.rand(gradient.shape, generator=NOISE))


NOISE = torch.Generator()


def _verify_then_train(kind: str) -> tuple[bool, bool]:
    model, batch = build(WAN)
    model.blocks[0].ffn.register_forward_hook(lambda module, args, output: Refusing.apply(output))
    model = WRAPPERS[kind](model)
    inner = getattr(model, "module", model)
    fastac.enable(inner)
    found = fastac.verify(model, **batch)

    def step() -> float:
        model.zero_grad()
        model(**batch)[0].square().mean().backward()
        return sum(float(getattr(p.grad, "_local_tensor", p.grad).double().square().sum()) for p in model.parameters())

    first, second = step(), step()
    return "within the noise" in str(found), abs(first - second) < 1e-3 * first


@pytest.mark.parametrize("kind", WRAPPERS)
def test_no_step_ends_in_the_middle_of_a_backward(kind: str) -> None:
    """As one under deterministic algorithms may, which would leave the wrapper in it."""
    assert ranks.run(_verify_then_train, kind) == [(True, True)] * 2


class Meeting:
    """Rank 0 goes into an exchange once rank 1 does; or once that raised, and waits a second for it, in vain."""

    def __init__(self) -> None:
        self.store, self.number = _get_default_store(), 0

    def come(self) -> None:
        if dist.get_rank() == 1:
            self.tell("comes")
        elif self.store.get(str(self.number)) == b"raised":
            _set_pg_timeout(dt.timedelta(seconds=1))
        self.number += 1

    def tell(self, what: str) -> None:
        self.store.set(str(self.number), what)


def _verify_failing(raised: str) -> tuple[str, str]:
    model: Any = ulysses_stack()
    meeting, forward, fails = Meeting(), model.forward, dist.get_rank() == 1

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        if fails and raised == "ValueError":
            raise ValueError("this rank's own")
        meeting.come()
        return ulysses(*tensors, dropout_p=0.5 if fails else 0.0)

    def telling(**inputs: torch.Tensor) -> torch.Tensor:
        try:
            return forward(**inputs)
        except Exception:
            meeting.tell("raised")
            raise

    model.forward = telling
    for block in model.blocks:
        block.attend = attend
    try:
        fastac.verify(model, blocks="blocks", **part_of_inputs())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("raised", "elsewhere", "cause"),
    [
        ("PolicyNotAppliedError", "PolicyNotAppliedError", "blocks.0"),
        ("ValueError", "FastacError", "this rank's own"),
    ],
)
def test_it_fails_on_all_where_it_fails_on_one(raised: str, elsewhere: str, cause: str) -> None:
    """Rank 0 waits in an exchange of the model until its limit, and then names the cause, too."""
    first, second = ranks.results(ranks.outcomes(_verify_failing, raised))
    assert (first[0], second[0]) == (elsewhere, raised)
    assert first[1].startswith("rank 0 of 2: ")
    assert "rank 1 of 2: " in first[1]
    assert cause in first[1]
    assert cause in second[1]


def _unequal() -> str:
    model, batch = build(WAN)
    if dist.get_rank() == 1:
        del model.blocks[1]  # type: ignore[index, union-attr]
    with pytest.raises(fastac.FastacError, match="different numbers of blocks") as error:
        fastac.verify(model, per_block=True, **batch)
    return str(error.value)


def test_unequal_numbers_of_blocks() -> None:
    for rank, message in enumerate(ranks.run(_unequal)):
        assert f"rank {rank} of 2" in message


# Errors of training


def _refused_on_one_rank() -> str:
    """FSDP2 units inside blocks gather while a block runs: rank 1 must find its error without a rerun."""
    model: Any = stack()
    if dist.get_rank() == 1:
        for block in model.blocks:
            block.attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.1)
    wrapped = sharded_inside(model)
    fastac.enable(model, blocks="blocks")
    try:
        loss_of(wrapped(**stack_inputs(seed=dist.get_rank()))).backward()
    except RuntimeError as error:
        if dist.get_rank() == 0:
            return str(error)
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(1)  # as a script that fails: the others lose their connection
    return ""


def test_an_error_on_one_rank_ends_all() -> None:
    first, second = ranks.outcomes(_refused_on_one_rank)
    assert first.result, f"rank 0 waits for rank 1 in vain: {first.error}"
    assert "PolicyNotAppliedError rank 1 of 2: " in second.error
    assert "blocks.0" in second.error


def _error() -> list[Exception]:
    error = fastac.PolicyNotAppliedError("what was seen")
    return [error, copy.copy(error), pickle.loads(pickle.dumps(error))]


def test_an_error_keeps_the_rank_it_was_raised_on() -> None:
    """Also in another process, which gets it pickled."""
    for rank, errors in enumerate(ranks.run(_error)):
        assert {str(error) for error in errors} == {f"rank {rank} of 2: what was seen"}
        assert {type(error) for error in errors} == {fastac.PolicyNotAppliedError}
