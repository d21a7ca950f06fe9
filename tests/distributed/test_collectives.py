"""The rule by op: an exchange is saved and not issued again, a gather is issued again, a written buffer is no output.

Two ranks run a block with one collective in the middle and attention after it, under every policy.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import fastac
from fastac.engine import releases
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured

ROWS, COLUMNS = 8, 8

RECOMPUTED = Policy("attn_only", collectives="recompute")
WAYS: dict[str, str | Policy] = {"none": "none", "full": "torch", "attn_only": "attn_only", "repeated": RECOMPUTED}

_c10d = torch.ops._c10d_functional
Op = Callable[[torch.Tensor], torch.Tensor]


def _group() -> str:
    assert dist.group.WORLD is not None
    name: str = dist.group.WORLD.group_name
    return name


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _c10d.wait_tensor(tensor)
    return waited


class _Differentiable(torch.autograd.Function):
    """A collective and the one that is its backward, as torch's and diffusers' own are written."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op, backward: Op) -> torch.Tensor:
        ctx.op = backward
        return op(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.op(grad.contiguous()), None, None


# Collectives


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.all_reduce(x, "sum", _group()))


def _all_reduce_coalesced(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([_wait(one) for one in _c10d.all_reduce_coalesced(list(x.chunk(2)), "sum", _group())])


def _all_to_all(x: torch.Tensor) -> torch.Tensor:
    half = [x.shape[0] // 2] * 2
    return _wait(_c10d.all_to_all_single(x, half, half, _group()))


def _uneven(x: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Rank 0 is sent 3 rows by each, rank 1 gets 5."""
    sent, received = [3, 5], [[3, 3], [5, 5]][dist.get_rank()]
    splits = (sent, received) if back else (received, sent)
    return _wait(_c10d.all_to_all_single(x, *splits, _group()))


def _reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.reduce_scatter_tensor(x, "sum", 2, _group()))


def _reduce_scatter_coalesced(x: torch.Tensor) -> torch.Tensor:
    scattered = _c10d.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", 2, _group())
    return _wait(scattered[0]) + _wait(scattered[1])


def _shard_dim(x: torch.Tensor, gathered: int = 0) -> torch.Tensor:
    return _wait(torch.ops._dtensor.shard_dim_alltoall(x, gathered, 1 - gathered, _group()))


def _all_gather(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.all_gather_into_tensor(x, 2, _group()))


def _all_gather_coalesced(x: torch.Tensor) -> torch.Tensor:
    gathered = _c10d.all_gather_into_tensor_coalesced([x, 2 * x], 2, _group())
    return _wait(gathered[0]) + _wait(gathered[1])


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.broadcast(x, 0, _group()))


class Case(NamedTuple):
    """A collective, its backward, the bytes that it returns for a tensor of 8 x 8 on each rank, and what is done."""

    op: Op
    backward: Op
    returned: tuple[int, int]
    saved: bool = True


WHOLE = ROWS * COLUMNS * 4

CASES = {
    "all_reduce": Case(_all_reduce, _all_reduce, (WHOLE, WHOLE)),
    "all_reduce_coalesced": Case(_all_reduce_coalesced, _all_reduce, (WHOLE, WHOLE)),
    "all_to_all_single": Case(_all_to_all, _all_to_all, (WHOLE, WHOLE)),
    "all_to_all_single, uneven": Case(_uneven, functools.partial(_uneven, back=True), (192, 320)),
    "reduce_scatter_tensor": Case(_reduce_scatter, _all_gather, (WHOLE // 2, WHOLE // 2)),
    "reduce_scatter_tensor_coalesced": Case(_reduce_scatter_coalesced, _all_gather, (WHOLE, WHOLE)),
    "shard_dim_alltoall": Case(_shard_dim, functools.partial(_shard_dim, gathered=1), (WHOLE, WHOLE)),
    "all_gather_into_tensor": Case(_all_gather, _reduce_scatter, (2 * WHOLE, 2 * WHOLE), saved=False),
    "all_gather_into_tensor_coalesced": Case(
        _all_gather_coalesced, _reduce_scatter, (4 * WHOLE, 4 * WHOLE), saved=False
    ),
    "broadcast": Case(_broadcast, _all_reduce, (WHOLE, WHOLE), saved=False),
}


# Ways to call them


def _function(op: Op, backward: Op = _all_reduce) -> Op:
    return lambda x: _Differentiable.apply(x, op, backward)  # type: ignore[no-any-return]


def _several(x: torch.Tensor) -> torch.Tensor:
    """Three in flight, waited for after something else, and in another order than they were issued."""

    def together(tensor: torch.Tensor) -> torch.Tensor:
        first = _c10d.all_reduce(tensor, "sum", _group())
        second = _c10d.all_to_all_single(tensor, [4, 4], [4, 4], _group())
        third = _c10d.all_reduce(2 * tensor, "max", _group())
        meanwhile = torch.cos(tensor) @ tensor.T
        return _wait(third) * _wait(first) - _wait(second) + meanwhile

    return _Differentiable.apply(x, together, _all_reduce)  # type: ignore[no-any-return]


def _written_after(x: torch.Tensor) -> torch.Tensor:
    """The result is changed in place inside a Function, where autograd has no objection."""

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return _all_reduce(tensor).mul_(3).add_(tensor)

    return _Differentiable.apply(x, written, lambda grad: 3 * _all_reduce(grad) + grad)  # type: ignore[no-any-return]


def _of_autograd(x: torch.Tensor) -> torch.Tensor:
    """torch's own differentiable ops, as all_to_all_single_autograd and its like call them."""
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


def _functional_in_place(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.all_reduce_(x.clone(), "sum", _group()))


WRITING: dict[str, Op] = {
    "all_to_all_single": _function(_all_to_all_out, _all_to_all_out),
    "all_reduce": _function(_reduced_in_place, _reduced_in_place),
    "all_reduce_": _function(_functional_in_place, _functional_in_place),
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
        out: torch.Tensor = self.after(attended * moved)
        return out


class Region(torch.nn.Module):
    """One block, checkpointed."""

    def __init__(self, call: Op, way: str) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([AttentionBlock(call)])
        self.policy = WAYS[way]
        with torch.no_grad():
            self.blocks[0](batch_of(0)["x"])  # its last layer is as wide as it needs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = support.run_checkpointed(self.blocks[0], x, policy=self.policy)
        return out


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(rank))
    return {"x": x.requires_grad_()}


class Did(NamedTuple):
    """A step, and what `fastac.report` says: issued, saved, again, the same in bytes, and writing."""

    step: Measured
    numbers: tuple[int, int, int] | None
    sizes: tuple[int, int, int] | None
    writing: int


def measured(call: Op, way: str) -> Did:
    """One step of a region on this rank."""
    region = Region(call, way)
    step = steps.measured(region, batch_of(dist.get_rank()))
    row = fastac.report(region).rows[0]
    found = row.communication
    if found is None:
        return Did(step, None, None, row.writing)
    numbers = found.issued, found.saved, found.again
    return Did(step, numbers, (found.issued_bytes, found.saved_bytes, found.again_bytes), row.writing)


def _every(table: str, names: list[str]) -> dict[str, dict[str, Did]]:
    calls: dict[str, Callable[[str], Op]] = {
        "cases": lambda name: _function(CASES[name].op, CASES[name].backward),
        "calls": lambda name: CALLS[name][0],
        "writing": lambda name: WRITING[name],
    }
    return {name: {way: measured(calls[table](name), way) for way in WAYS} for name in names}


def assert_issued(found: dict[str, Did], again: dict[str, bool], name: str) -> None:
    """No bit is changed. Collectives in backward are its own, and those of the forward where they are issued again."""
    plain = found["none"].step
    assert plain.forward, name
    for way, did in found.items():
        try:
            support.assert_same(did.step.tensors, plain.tensors)
        except AssertionError as error:
            raise AssertionError(f"{name}, {way}: {error}") from None
        assert did.step.forward == plain.forward, f"{name}, {way}: {did.step.forward}"
        expected = plain.backward + plain.forward if again[way] else plain.backward
        assert did.step.backward == expected, f"{name}, {way}: {did.step.backward}, not {expected}"
        assert did.step.attention == ((1, 1) if way == "full" else (1, 0)), f"{name}, {way}: {did.step.attention}"


def test_exchanges_are_saved_and_gathers_issued_again() -> None:
    for rank, every in enumerate(ranks.run(_every, "cases", list(CASES))):
        for name, found in every.items():
            case, size = CASES[name], CASES[name].returned[rank]
            assert_issued(found, {"none": False, "full": True, "attn_only": not case.saved, "repeated": True}, name)
            count = found["attn_only"].numbers[0] if found["attn_only"].numbers else 0
            assert count, name
            for way, saved in (("attn_only", case.saved), ("repeated", False)):
                assert found[way].numbers == (count, count * saved, count * (not saved)), f"{name}, {way}"
                assert found[way].sizes == (size, size * saved, size * (not saved)), f"{name}, {way}"
                assert not found[way].writing


def test_pending_results_are_copied_at_their_wait() -> None:
    """In a Function autograd has no objection to a change, and what is in flight is not there yet."""
    for every in ranks.run(_every, "calls", list(CALLS)):
        for name, found in every.items():
            numbers = CALLS[name][1]
            assert found["attn_only"].numbers == numbers, name
            assert_issued(found, {"none": False, "full": True, "attn_only": numbers[2] > 0, "repeated": True}, name)


def test_what_writes_a_buffer_is_never_saved() -> None:
    """Its result is not what it returns: saved, it would be what the buffer held before."""
    for every in ranks.run(_every, "writing", list(WRITING)):
        for name, found in every.items():
            assert_issued(found, {way: way != "none" for way in WAYS}, name)
            for way in ("attn_only", "repeated"):
                assert (found[way].numbers, found[way].writing) == (None, 1), f"{name}, {way}"


# Errors


def _changed_in_place(x: torch.Tensor) -> torch.Tensor:
    """No Function around it: torch's own op without a derivative, on what requires grad."""
    moved = _shard_dim(x)
    with torch.no_grad():
        moved.add_(1)
    return x * moved.detach().reshape(x.shape)


def _other_in_recompute(other: Op, first: Op) -> Op:
    calls = iter([first, first, other])  # when the region is made, in the forward, in recompute
    return lambda x: _function(next(calls))(x)


REFUSED: dict[str, tuple[Callable[[], Op], str]] = {
    "another op": (lambda: _other_in_recompute(_all_to_all, _all_reduce), "all_to_all.*all_reduce"),
    "changed in place": (lambda: _changed_in_place, "changed in place"),
}
"""What is refused -> a call, and what the error says."""

if releases.is_at_least("2.14"):  # the op has a derivative then: the change is exact, or an error of torch's
    del REFUSED["changed in place"]


def _errors() -> dict[str, str]:
    found = {}
    for name, (call, _) in REFUSED.items():
        try:
            measured(call(), "attn_only")
        except fastac.FastacError as error:
            found[name] = str(error)
    return found


def test_a_recompute_that_communicates_otherwise_is_an_error() -> None:
    """On every rank, before it could hang."""
    for found in ranks.run(_errors):
        assert found.keys() == REFUSED.keys(), found
        for name, (_, said) in REFUSED.items():
            assert re.search(said, found[name]), found[name]


def _waited_outside(policy: str) -> tuple[support.Tensors, int]:
    """A region returns what is not waited for yet."""
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
    """A block of units of FSDP2 that also sums over the ranks in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = WRITING["all_reduce"](self.first(x))[None, None]
        out: torch.Tensor = self.second(F.scaled_dot_product_attention(heads, heads * 2, heads)[0, 0])
        return out


def _sharded(engine: str) -> tuple[int, Any, int]:
    block: Any = ShardedAttention()
    if engine == "fsdp1":
        block = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
    else:
        for unit in (block.first, block.second):
            fully_shard(unit)
    support.loss_of(fastac.checkpoint(block, batch_of(dist.get_rank())["x"])).backward()
    (row,) = fastac.report(torch.nn.ModuleList([block])).rows
    return row.saved, row.communication, row.writing


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_what_fsdp_gathers_for_itself_is_not_counted(engine: str) -> None:
    """FSDP1's forward is around the model's own, whose collectives count."""
    assert ranks.run(_sharded, engine) == [(1, None, 1)] * 2


def _gathered_is_held(policy: str) -> bool:
    """Whether what was gathered lives on after the forward; without checkpointing the product's backward needs it."""
    gathered = []

    def region(x: torch.Tensor) -> torch.Tensor:
        whole = _gathered_by_autograd(x)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        heads = (whole @ whole.T)[None, None]
        return F.scaled_dot_product_attention(heads, heads * 2, heads)

    out = support.run_checkpointed(region, batch_of(dist.get_rank())["x"], policy=policy)
    gc.collect()
    held = not gathered[0].expired()
    out.sum().backward()
    return held


def test_gathered_parameters_are_not_held() -> None:
    """As by SimpleFSDP: saving them would pin unsharded weights."""
    assert ranks.run(_gathered_is_held, "none") == [True, True]
    assert ranks.run(_gathered_is_held, "attn_only") == [False, False]
