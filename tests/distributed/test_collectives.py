"""The rule by op: an exchange is saved, a gather is issued again, and so is what writes a buffer.

Two ranks run a block with one collective in the middle and attention after it, under every policy.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import fastac
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import Differentiable, all_to_all_out
from tests.distributed.steps import Measured

ROWS, COLUMNS = 8, 8
WHOLE = ROWS * COLUMNS * 4
"""Bytes of a tensor."""

RECOMPUTED = Policy("attn_only", collectives="recompute")
WAYS: dict[str, str | Policy] = {"none": "none", "full": "torch", "attn_only": "attn_only", "repeated": RECOMPUTED}

_c10d = torch.ops._c10d_functional
Op = Callable[[torch.Tensor], torch.Tensor]


_wait = _c10d.wait_tensor


def _group() -> str:
    return dist.group.WORLD.group_name


# Collectives


def _collective(name: str, *options: Any) -> Op:
    """A functional collective by its name, and its wait."""
    return lambda x: _wait(getattr(_c10d, name)(x, *options, _group()))


def _coalesced(name: str, *options: Any) -> Op:
    """One of two tensors."""
    return lambda x: torch.stack([_wait(one) for one in getattr(_c10d, name)([x, 2 * x], *options, _group())]).sum(0)


_all_reduce = _collective("all_reduce", "sum")
_all_to_all = _collective("all_to_all_single", [ROWS // 2] * 2, [ROWS // 2] * 2)
_reduce_scatter = _collective("reduce_scatter_tensor", "sum", 2)
_all_gather = _collective("all_gather_into_tensor", 2)


def _uneven(x: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Each rank sends 3 rows to rank 0, and 5 to rank 1."""
    sent, received = [3, 5], [[3, 3], [5, 5]][dist.get_rank()]
    splits = (sent, received) if back else (received, sent)
    return _wait(_c10d.all_to_all_single(x, *splits, _group()))


def _shard_dim(x: torch.Tensor, gathered: int = 0) -> torch.Tensor:
    return _wait(torch.ops._dtensor.shard_dim_alltoall(x, gathered, 1 - gathered, _group()))


def _several(x: torch.Tensor) -> torch.Tensor:
    """Three in flight, waited for after something else, and in another order than they were issued."""
    first = _c10d.all_reduce(x, "sum", _group())
    second = _c10d.all_to_all_single(x, [4, 4], [4, 4], _group())
    third = _c10d.all_reduce(2 * x, "max", _group())
    meanwhile = torch.cos(x) @ x.T
    return _wait(third) * _wait(first) - _wait(second) + meanwhile


def _of_autograd(x: torch.Tensor) -> torch.Tensor:
    """torch's own differentiable ops."""
    ops = torch.ops._c10d_functional_autograd
    sent = _wait(ops.all_to_all_single(x, [4, 4], [4, 4], _group()))
    return _wait(ops.reduce_scatter_tensor(torch.sin(sent), "sum", 2, _group()))


def _gathered_by_autograd(x: torch.Tensor) -> torch.Tensor:
    return _wait(torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 2, _group()))


def _reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


class Case(NamedTuple):
    """backward: None for what autograd differentiates itself. size: bytes returned on each rank, of those given.

    saved: whether the policy saves it. issued: collectives of a forward; 0 for what writes a buffer.
    """

    op: Op
    backward: Op | None
    size: tuple[float, float] = (1, 1)
    saved: bool = True
    issued: int = 1


_two_gathered = _coalesced("all_gather_into_tensor_coalesced", 2)
_two_scattered = _coalesced("reduce_scatter_tensor_coalesced", "sum", 2)
_written = _collective("all_reduce_", "sum")
NOTHING = 0, 0

EXCHANGES = {
    "all_reduce": Case(_all_reduce, _all_reduce),
    "all_reduce_coalesced": Case(_coalesced("all_reduce_coalesced", "sum"), _all_reduce, (2, 2)),
    "all_to_all_single": Case(_all_to_all, _all_to_all),
    "all_to_all_single, uneven": Case(_uneven, functools.partial(_uneven, back=True), (0.75, 1.25)),
    "reduce_scatter_tensor": Case(_reduce_scatter, _all_gather, (0.5, 0.5)),
    "reduce_scatter_tensor_coalesced": Case(_two_scattered, _all_gather),
    "shard_dim_alltoall": Case(_shard_dim, functools.partial(_shard_dim, gathered=1)),
    "all_gather_into_tensor": Case(_all_gather, _reduce_scatter, (2, 2), saved=False),
    "all_gather_into_tensor_coalesced": Case(_two_gathered, _reduce_scatter, (4, 4), saved=False),
    "broadcast": Case(_collective("broadcast", 0), _all_reduce, saved=False),
    "of autograd": Case(_of_autograd, None, (1.5, 1.5), issued=2),
    "gathered by autograd": Case(_gathered_by_autograd, None, (2, 2), saved=False),
}
PENDING = {
    "several in flight": Case(_several, _all_reduce, (3, 3), issued=3),
    "written after its wait": Case(lambda x: _all_reduce(x).mul_(3).add_(x), lambda grad: 3 * _all_reduce(grad) + grad),
}
WRITING = {
    "all_to_all_single": Case(all_to_all_out, all_to_all_out, NOTHING, saved=False, issued=0),
    "all_reduce": Case(_reduced_in_place, _reduced_in_place, NOTHING, saved=False, issued=0),
    "all_reduce_": Case(lambda x: _written(x.clone()), _all_reduce, NOTHING, saved=False, issued=0),
}
TABLES = {"exchanges": EXCHANGES, "pending": PENDING, "writing": WRITING}


def _function(op: Op, backward: Op | None = _all_reduce) -> Op:
    return op if backward is None else lambda x: Differentiable.apply(x, op, backward)


class AttentionBlock(torch.nn.Module):
    """A linear layer, a collective, attention over the rows, a linear layer."""

    def __init__(self, call: Op) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS)
        self.call = call

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        moved = torch.tanh(self.call(torch.sin(self.before(video)))) + text
        heads = moved[None, None]
        attended = F.scaled_dot_product_attention(heads, heads * 2, heads)[0, 0]
        return self.after(F.pad(attended * moved, (0, COLUMNS - moved.shape[-1])))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {"video": torch.randn(ROWS, COLUMNS, generator=generator).requires_grad_(), "text": torch.ones(())}


class Did(NamedTuple):
    """A step, and what `fastac.report` says of its collectives."""

    step: Measured
    communication: Any
    writing: int


def measured(call: Op, way: str) -> Did:
    model = support.stack(layers=1, block=lambda: AttentionBlock(call), policy=WAYS[way])
    step = steps.measured(model, batch())
    (row,) = fastac.report(model).rows
    return Did(step, row.communication, row.writing)


def _every(table: str) -> dict[str, dict[str, Did]]:
    return {
        name: {way: measured(_function(case.op, case.backward), way) for way in WAYS}
        for name, case in TABLES[table].items()
    }


@pytest.mark.parametrize("table", TABLES)
def test_what_is_saved_and_what_is_issued_again(table: str) -> None:
    """No bit changes. In backward its own collectives run, and those of the forward that are issued again.

    A result in flight is not complete: it is copied at its wait, and inside a Function autograd does not notice a
    change of it. What writes a buffer is never saved: replayed, the buffer would stay unwritten.
    """
    for rank, every in enumerate(ranks.run(_every, table)):
        for name, found in every.items():
            case, plain = TABLES[table][name], found["none"].step
            again = {"none": False, "full": True, "attn_only": not case.saved, "repeated": True}
            assert plain.forward, name
            for way, (step, communication, writing) in found.items():
                support.assert_same(step.tensors, plain.tensors)
                assert step.forward == plain.forward, f"{name}, {way}: {step.forward}"
                expected = plain.backward + plain.forward if again[way] else plain.backward
                assert step.backward == expected, f"{name}, {way}: {step.backward}, not {expected}"
                assert step.attention == ((1, 1) if way == "full" else (1, 0)), f"{name}, {way}: {step.attention}"
                if way in ("attn_only", "repeated"):
                    once = case.issued, case.size[rank] * WHOLE
                    reported = (*once, *NOTHING, *once) if again[way] else (*once, *once, *NOTHING)
                    said = dataclasses.astuple(communication) if communication else None
                    assert said == (reported if case.issued else None), f"{name}, {way}"
                    assert writing == (not case.issued), f"{name}, {way}"


# Errors


def _refused() -> str:
    calls = iter([_all_reduce, _all_to_all])  # in the forward, in recompute
    with pytest.raises(fastac.FastacError) as error:
        measured(lambda x: _function(next(calls))(x), "attn_only")
    return str(error.value)


def test_a_recompute_that_communicates_otherwise_is_an_error() -> None:
    """On every rank, before one hangs."""
    assert all(re.search("all_to_all.*all_reduce", message) for message in ranks.run(_refused))


def _waited_outside() -> list[tuple[support.Tensors, int]]:
    """A region returns a result that nobody has waited for: without checkpointing, and with it."""

    def region(x: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(torch.sin(x), [4, 4], [4, 4], _group())

    found = []
    for policy in ("none", "attn_only"):
        x = batch()["video"]
        moved = support.run_checkpointed(region, x, policy=policy)
        assert isinstance(moved, functional.AsyncCollectiveTensor)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            torch.cos(moved).sum().backward()
        result = torch.Tensor(moved.trigger_wait().detach())
        found.append(({"result": result, "gradient": x.grad}, steps.collectives(profiled)["gloo:all_to_all"]))
    return found


def test_a_result_that_is_waited_for_after_its_region() -> None:
    for (expected, _), (found, sent) in ranks.run(_waited_outside):
        support.assert_same(found, expected)
        assert sent == 1


# FSDP, and parameters that are gathered where they are used, as by SimpleFSDP


def _sharded() -> tuple[int, Any, int]:
    """A block that also sums over the ranks in place."""
    block: Any = AttentionBlock(_function(_reduced_in_place, _reduced_in_place))
    for unit in (block.before, block.after):
        fully_shard(unit)
    support.loss_of(fastac.checkpoint(block, **batch())).backward()
    (row,) = fastac.report(torch.nn.ModuleList([block])).rows
    return row.saved, row.communication, row.writing


def test_what_fsdp_gathers_for_itself_is_not_counted() -> None:
    """The model's own collectives count."""
    assert ranks.run(_sharded) == [(1, None, 1)] * 2


def _gathered_is_held() -> bool:
    gathered = []

    def region(x: torch.Tensor) -> torch.Tensor:
        whole = _gathered_by_autograd(x)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        heads = (whole @ whole.T)[None, None]
        return F.scaled_dot_product_attention(heads, heads * 2, heads)

    out = fastac.checkpoint(region, batch()["video"])
    until = time.monotonic() + 120  # gloo's own thread lets go of what it gathered a moment later
    while not gathered[0].expired() and time.monotonic() < until:
        time.sleep(0.01)
    held = not gathered[0].expired()
    out.sum().backward()
    return held


def test_gathered_parameters_are_not_held() -> None:
    """As in SimpleFSDP: saving them would pin unsharded weights."""
    assert ranks.run(_gathered_is_held) == [False, False]
