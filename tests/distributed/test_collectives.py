"""The rule by op: an exchange is saved, a gather is issued again, and so is what writes a buffer.

Two ranks run a block with one collective in the middle and attention after it, under every policy.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import fastac
from fastac.engine.collectives import Communication
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured

ROWS, COLUMNS = 8, 8

RECOMPUTED = Policy("attn_only", collectives="recompute")
WAYS: dict[str, str | Policy] = {"none": "none", "full": "torch", "attn_only": "attn_only", "repeated": RECOMPUTED}

_c10d = torch.ops._c10d_functional
Op = Callable[[torch.Tensor], torch.Tensor]


_wait = _c10d.wait_tensor


def _group() -> str:
    return dist.group.WORLD.group_name


class _Differentiable(torch.autograd.Function):
    """A collective and the one that is its backward, as in torch and diffusers."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op, backward: Op) -> torch.Tensor:
        ctx.op = backward
        return op(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.op(grad.contiguous()), None, None


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


class Case(NamedTuple):
    """returned: its bytes on each rank for a tensor of 8 x 8. saved: whether the policy saves it."""

    op: Op
    backward: Op
    returned: tuple[int, int]
    saved: bool = True


WHOLE = ROWS * COLUMNS * 4

CASES = {
    "all_reduce": Case(_all_reduce, _all_reduce, (WHOLE, WHOLE)),
    "all_reduce_coalesced": Case(_coalesced("all_reduce_coalesced", "sum"), _all_reduce, (2 * WHOLE, 2 * WHOLE)),
    "all_to_all_single": Case(_all_to_all, _all_to_all, (WHOLE, WHOLE)),
    "all_to_all_single, uneven": Case(_uneven, functools.partial(_uneven, back=True), (192, 320)),
    "reduce_scatter_tensor": Case(_reduce_scatter, _all_gather, (WHOLE // 2, WHOLE // 2)),
    "reduce_scatter_tensor_coalesced": Case(
        _coalesced("reduce_scatter_tensor_coalesced", "sum", 2), _all_gather, (WHOLE, WHOLE)
    ),
    "shard_dim_alltoall": Case(_shard_dim, functools.partial(_shard_dim, gathered=1), (WHOLE, WHOLE)),
    "all_gather_into_tensor": Case(_all_gather, _reduce_scatter, (2 * WHOLE, 2 * WHOLE), saved=False),
    "all_gather_into_tensor_coalesced": Case(
        _coalesced("all_gather_into_tensor_coalesced", 2), _reduce_scatter, (4 * WHOLE, 4 * WHOLE), saved=False
    ),
    "broadcast": Case(_collective("broadcast", 0), _all_reduce, (WHOLE, WHOLE), saved=False),
}


# Ways to call them


def _function(op: Op, backward: Op = _all_reduce) -> Op:
    return lambda x: _Differentiable.apply(x, op, backward)


def _several(x: torch.Tensor) -> torch.Tensor:
    """Three in flight, waited for after something else, and in another order than they were issued."""

    def together(tensor: torch.Tensor) -> torch.Tensor:
        first = _c10d.all_reduce(tensor, "sum", _group())
        second = _c10d.all_to_all_single(tensor, [4, 4], [4, 4], _group())
        third = _c10d.all_reduce(2 * tensor, "max", _group())
        meanwhile = torch.cos(tensor) @ tensor.T
        return _wait(third) * _wait(first) - _wait(second) + meanwhile

    return _Differentiable.apply(x, together, _all_reduce)


def _written_after(x: torch.Tensor) -> torch.Tensor:
    """The result is changed in place inside a Function, where autograd allows it."""

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return _all_reduce(tensor).mul_(3).add_(tensor)

    return _Differentiable.apply(x, written, lambda grad: 3 * _all_reduce(grad) + grad)


def _of_autograd(x: torch.Tensor) -> torch.Tensor:
    """torch's own differentiable ops."""
    ops = torch.ops._c10d_functional_autograd
    sent = _wait(ops.all_to_all_single(x, [4, 4], [4, 4], _group()))
    return _wait(ops.reduce_scatter_tensor(torch.sin(sent), "sum", 2, _group()))


def _gathered_by_autograd(x: torch.Tensor) -> torch.Tensor:
    return _wait(torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 2, _group()))


CALLS: dict[str, tuple[Op, tuple[int, int, int]]] = {
    "several in flight": (_several, (3, 3, 0)),
    "written after its wait": (_written_after, (1, 1, 0)),
    "of autograd": (_of_autograd, (2, 2, 0)),
    "gathered by autograd": (_gathered_by_autograd, (1, 0, 1)),
}
"""Name -> a call, and what is reported of it: issued, saved, again."""


# Calls that write a buffer


def _all_to_all_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


WRITING: dict[str, Op] = {
    "all_to_all_single": _function(_all_to_all_out, _all_to_all_out),
    "all_reduce": _function(_reduced_in_place, _reduced_in_place),
    "all_reduce_": _function(lambda x: _collective("all_reduce_", "sum")(x.clone()), _all_reduce),
}


class AttentionBlock(torch.nn.Module):
    """A linear layer, a collective, attention over the rows, a linear layer."""

    def __init__(self, call: Op) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.LazyLinear(COLUMNS)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = torch.tanh(self.call(torch.sin(self.before(x))))
        heads = moved[None, None]
        attended = F.scaled_dot_product_attention(heads, heads * 2, heads)[0, 0]
        return self.after(attended * moved)


class Region(torch.nn.Module):
    def __init__(self, call: Op, way: str) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([AttentionBlock(call)])
        self.policy = WAYS[way]
        with torch.no_grad():
            self.blocks[0](batch_of(0)["x"])  # its last layer is as wide as it needs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return support.run_checkpointed(self.blocks[0], x, policy=self.policy)


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(rank))
    return {"x": x.requires_grad_()}


class Did(NamedTuple):
    """A step, and what `fastac.report` says of its collectives."""

    step: Measured
    communication: Communication | None
    writing: int


def measured(call: Op, way: str) -> Did:
    region = Region(call, way)
    step = steps.measured(region, batch_of(dist.get_rank()))
    (row,) = fastac.report(region).rows
    return Did(step, row.communication, row.writing)


def _every(table: str, names: list[str]) -> dict[str, dict[str, Did]]:
    calls: dict[str, Callable[[str], Op]] = {
        "cases": lambda name: _function(CASES[name].op, CASES[name].backward),
        "calls": lambda name: CALLS[name][0],
        "writing": lambda name: WRITING[name],
    }
    return {name: {way: measured(calls[table](name), way) for way in WAYS} for name in names}


def assert_issued(found: dict[str, Did], again: dict[str, bool], name: str) -> None:
    """No bit changes. In backward its own collectives run, and those of the forward that are issued again."""
    plain = found["none"].step
    assert plain.forward, name
    for way, did in found.items():
        support.assert_same(did.step.tensors, plain.tensors)
        assert did.step.forward == plain.forward, f"{name}, {way}: {did.step.forward}"
        expected = plain.backward + plain.forward if again[way] else plain.backward
        assert did.step.backward == expected, f"{name}, {way}: {did.step.backward}, not {expected}"
        assert did.step.attention == ((1, 1) if way == "full" else (1, 0)), f"{name}, {way}: {did.step.attention}"


def test_exchanges_are_saved_and_gathers_issued_again() -> None:
    for rank, every in enumerate(ranks.run(_every, "cases", list(CASES))):
        for name, found in every.items():
            case, size = CASES[name], CASES[name].returned[rank]
            assert_issued(found, {"none": False, "full": True, "attn_only": not case.saved, "repeated": True}, name)
            count = found["attn_only"].communication.issued
            once, never = (count, size), (0, 0)
            for way, saved in (("attn_only", case.saved), ("repeated", False)):
                expected = (*once, *once, *never) if saved else (*once, *never, *once)
                assert found[way].communication == Communication(*expected), f"{name}, {way}"
                assert not found[way].writing


def test_pending_results_are_copied_at_their_wait() -> None:
    """A result in flight is not complete, and inside a Function autograd does not notice a change of it."""
    for every in ranks.run(_every, "calls", list(CALLS)):
        for name, found in every.items():
            numbers = CALLS[name][1]
            assert steps.numbers(found["attn_only"].communication) == numbers, name
            assert_issued(found, {"none": False, "full": True, "attn_only": numbers[2] > 0, "repeated": True}, name)


def test_what_writes_a_buffer_is_never_saved() -> None:
    """Its result is in the buffer: replayed, the buffer would stay unwritten."""
    for every in ranks.run(_every, "writing", list(WRITING)):
        for name, found in every.items():
            assert_issued(found, {way: way != "none" for way in WAYS}, name)
            for way in ("attn_only", "repeated"):
                assert (found[way].communication, found[way].writing) == (None, 1), f"{name}, {way}"


# Errors


def _other_in_recompute(other: Op, first: Op) -> Op:
    calls = iter([first, first, other])  # when the region is made, in the forward, in recompute
    return lambda x: _function(next(calls))(x)


def _refused() -> str:
    try:
        measured(_other_in_recompute(_all_to_all, _all_reduce), "attn_only")
    except fastac.FastacError as error:
        return str(error)
    return ""


def test_a_recompute_that_communicates_otherwise_is_an_error() -> None:
    """On every rank, before one hangs."""
    assert all(re.search("all_to_all.*all_reduce", message) for message in ranks.run(_refused))


def _waited_outside(policy: str) -> tuple[support.Tensors, int]:
    """A region returns a result that nobody has waited for."""
    x = batch_of(dist.get_rank())["x"]

    def region(x: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(torch.sin(x), [4, 4], [4, 4], _group())

    moved = support.run_checkpointed(region, x, policy=policy)
    assert isinstance(moved, functional.AsyncCollectiveTensor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.cos(moved).sum().backward()
    sent = steps.collectives(profiled)["gloo:all_to_all"]
    return {"result": torch.Tensor(moved.trigger_wait().detach()), "gradient": x.grad}, sent


def test_a_result_that_is_waited_for_after_its_region() -> None:
    for (expected, _), (found, sent) in zip(
        ranks.run(_waited_outside, "none"), ranks.run(_waited_outside, "attn_only"), strict=True
    ):
        support.assert_same(found, expected)
        assert sent == 1


# FSDP, and parameters that are gathered where they are used, as by SimpleFSDP


class ShardedAttention(torch.nn.Module):
    """A block that also sums over the ranks in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = WRITING["all_reduce"](self.first(x))[None, None]
        return self.second(F.scaled_dot_product_attention(heads, heads * 2, heads)[0, 0])


def _sharded() -> tuple[int, Any, int]:
    block: Any = ShardedAttention()
    for unit in (block.first, block.second):
        fully_shard(unit)
    support.loss_of(fastac.checkpoint(block, batch_of(dist.get_rank())["x"])).backward()
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

    out = fastac.checkpoint(region, batch_of(dist.get_rank())["x"])
    until = time.monotonic() + 5  # gloo's own thread lets go of what it gathered a moment later
    while not gathered[0].expired() and time.monotonic() < until:
        time.sleep(0.01)
    held = not gathered[0].expired()
    out.sum().backward()
    return held


def test_gathered_parameters_are_not_held() -> None:
    """As in SimpleFSDP: saving them would pin unsharded weights."""
    assert ranks.run(_gathered_is_held) == [False, False]
