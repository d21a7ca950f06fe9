"""The rule by op: an exchange is saved and not issued again, a gather is issued again, a written buffer is no output.

Two ranks run a block with one collective in the middle and attention after it, under every policy.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

import fastac
from fastac.engine import collectives
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured
from tests.live_bytes import LiveBytes

ROWS, COLUMNS = 8, 8

RECOMPUTED = Policy("attn_only", collectives="recompute")
WAYS: dict[str, tuple[str | Policy, str]] = {
    "none": ("none", ""),
    "full": ("torch", ""),
    "tape": ("attn_only", "tape"),
    "sac": ("attn_only", "sac"),
    "repeated": (RECOMPUTED, "tape"),
}

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


def _differentiable(case: Case) -> Op:
    return lambda x: _Differentiable.apply(x, case.op, case.backward)


def _late(x: torch.Tensor) -> torch.Tensor:
    """Waited for after something else was computed, in the same Function."""

    def overlapped(tensor: torch.Tensor) -> torch.Tensor:
        sent = _c10d.all_to_all_single(tensor, [4, 4], [4, 4], _group())
        meanwhile = torch.cos(tensor) @ tensor.T
        return _wait(sent) + meanwhile

    return _Differentiable.apply(x, overlapped, _all_to_all)  # type: ignore[no-any-return]


def _several(x: torch.Tensor) -> torch.Tensor:
    """Three in flight, waited for in another order than they were issued."""

    def together(tensor: torch.Tensor) -> torch.Tensor:
        first = _c10d.all_reduce(tensor, "sum", _group())
        second = _c10d.all_to_all_single(tensor, [4, 4], [4, 4], _group())
        third = _c10d.all_reduce(2 * tensor, "max", _group())
        return _wait(third) * _wait(first) - _wait(second)

    return _Differentiable.apply(x, together, _all_reduce)  # type: ignore[no-any-return]


def _written_after(x: torch.Tensor) -> torch.Tensor:
    """The result is changed in place inside a Function, where autograd has no objection."""

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return _all_reduce(tensor).mul_(3).add_(tensor)

    return _Differentiable.apply(x, written, lambda grad: 3 * _all_reduce(grad) + grad)  # type: ignore[no-any-return]


def _never_waited(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        _c10d.all_reduce(x.detach(), "sum", _group())
    return torch.sin(x)


def _of_autograd(x: torch.Tensor) -> torch.Tensor:
    """torch's own differentiable ops, as all_to_all_single_autograd and its like call them."""
    ops = torch.ops._c10d_functional_autograd
    sent = _wait(ops.all_to_all_single(x, [4, 4], [4, 4], _group()))
    return _wait(ops.reduce_scatter_tensor(torch.sin(sent), "sum", 2, _group()))


def _gathered_by_autograd(x: torch.Tensor) -> torch.Tensor:
    return _wait(torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 2, _group()))


CALLS: dict[str, tuple[Op, int]] = {
    "late": (_late, 1),
    "several": (_several, 3),
    "of autograd": (_of_autograd, 2),
}
"""Name -> a call, and how many collectives it issues, all of them exchanges."""


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
    "all_to_all_single": lambda x: _Differentiable.apply(x, _all_to_all_out, _all_to_all_out),  # type: ignore[no-any-return]
    "all_reduce": lambda x: _Differentiable.apply(x, _reduced_in_place, _reduced_in_place),  # type: ignore[no-any-return]
    "all_reduce_": lambda x: _Differentiable.apply(x, _functional_in_place, _functional_in_place),  # type: ignore[no-any-return]
}


class Block(torch.nn.Module):
    """A linear layer, a collective, attention over the rows, or the first of them, a linear layer."""

    def __init__(self, call: Op, rows: int | None = None) -> None:
        super().__init__()
        self.rows = rows
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.LazyLinear(COLUMNS)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = torch.tanh(self.call(torch.sin(self.before(x))))
        heads = moved[None, None]
        seen = heads[:, :, : self.rows]
        attended = F.scaled_dot_product_attention(heads, seen * 2, seen)[0, 0]
        out: torch.Tensor = self.after(attended * moved)
        return out


class Region(torch.nn.Module):
    """One block, checkpointed."""

    def __init__(self, call: Op, way: str) -> None:
        super().__init__()
        self.block = Block(call)
        self.policy, self.engine = WAYS[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = support.run_checkpointed(self.block, x, policy=self.policy, engine=self.engine)
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
    with torch.no_grad():
        region.block(batch_of(dist.get_rank())["x"])  # its last layer is as wide as it needs
    step = steps.measured(region, batch_of(dist.get_rank()))
    with support.reported_blocks({"block": region.block}):
        row = fastac.report(region).rows[0]
    found = row.communication
    if found is None:
        return Did(step, None, None, row.writing)
    numbers = found.issued, found.saved, found.again
    return Did(step, numbers, (found.issued_bytes, found.saved_bytes, found.again_bytes), row.writing)


def _each_way(table: str, name: str) -> dict[str, Did]:
    call: Op = {
        "cases": lambda: _differentiable(CASES[name]),
        "calls": lambda: CALLS[name][0],
        "writing": lambda: WRITING[name],
    }[table]()
    return {way: measured(call, way) for way in WAYS}


def _every(table: str, names: list[str]) -> dict[str, dict[str, Did]]:
    torch.manual_seed(0)
    return {name: _each_way(table, name) for name in names}


def assert_exact(found: dict[str, Did], name: str) -> None:
    """No way of checkpointing changes a bit."""
    for way, did in found.items():
        try:
            support.assert_same(did.step.tensors, found["none"].step.tensors)
        except AssertionError as error:
            raise AssertionError(f"{name}, {way}: {error}") from None


def assert_issued(found: dict[str, Did], again: dict[str, bool], name: str) -> None:
    """Collectives in backward: those of the backward itself, and those of the forward where they are issued again."""
    forward, backward = found["none"].step.forward, found["none"].step.backward
    assert forward, name
    for way, did in found.items():
        assert did.step.forward == forward, f"{name}, {way}: {did.step.forward}"
        expected = backward + forward if again[way] else backward
        assert did.step.backward == expected, f"{name}, {way}: {did.step.backward}, not {expected}"
        assert did.step.attention == ((1, 1) if way == "full" else (1, 0)), f"{name}, {way}: {did.step.attention}"


def check_every_op(folder: Path) -> None:
    """Exchanges are saved, gathers issued again, and the report tells it, with bytes."""
    for rank, every in enumerate(ranks.run(folder, _every, "cases", list(CASES))):
        for name, found in every.items():
            saved, size = CASES[name].saved, CASES[name].returned[rank]
            assert_exact(found, name)
            assert_issued(
                found, {"none": False, "full": True, "tape": not saved, "sac": not saved, "repeated": True}, name
            )
            for way in ("tape", "sac", "repeated"):
                kept = saved and way != "repeated"
                repeated = int(not kept)
                assert found[way].numbers == (1, int(kept), repeated), f"{name}, {way}: {found[way].numbers}"
                assert found[way].sizes == (size, size * kept, size * repeated), f"{name}, {way}: {found[way].sizes}"
                assert not found[way].writing


def test_every_op(tmp_path: Path) -> None:
    check_every_op(tmp_path)


def check_every_call(folder: Path) -> None:
    for every in ranks.run(folder, _every, "calls", list(CALLS)):
        for name, found in every.items():
            assert_exact(found, name)
            assert_issued(found, {"none": False, "full": True, "tape": False, "sac": False, "repeated": True}, name)
            count = CALLS[name][1]
            assert found["tape"].numbers == found["sac"].numbers == (count, count, 0), name


def test_every_call(tmp_path: Path) -> None:
    check_every_call(tmp_path)


def check_what_writes_a_buffer(folder: Path) -> None:
    """Its result is not what it returns: saved, it would be what the buffer held before."""
    for every in ranks.run(folder, _every, "writing", list(WRITING)):
        for name, found in every.items():
            assert_exact(found, name)
            assert_issued(found, {way: way != "none" for way in WAYS}, name)
            for way in ("tape", "sac", "repeated"):
                assert (found[way].numbers, found[way].writing) == (None, 1), f"{name}, {way}"


def test_what_writes_a_buffer(tmp_path: Path) -> None:
    check_what_writes_a_buffer(tmp_path)


def _odd_calls() -> dict[str, dict[str, Did]]:
    ways = [way for way in WAYS if way != "sac"]
    return {
        "written": {way: measured(_written_after, way) for way in ways},
        "never waited": {way: measured(_never_waited, way) for way in WAYS},
        "gathered": {way: measured(_gathered_by_autograd, way) for way in WAYS},
    }


def test_results_that_are_written_later_or_never_waited_for(tmp_path: Path) -> None:
    """In a Function autograd has no objection to a change: what is kept is a copy, made at the wait."""
    for every in ranks.run(tmp_path, _odd_calls):
        for name, found in every.items():
            assert_exact(found, name)
            assert found["tape"].numbers == ((1, 0, 1) if name == "gathered" else (1, 1, 0)), name
            assert found["repeated"].numbers == (1, 0, 1), name


def _errors() -> dict[str, str]:
    """What is refused, by what it says."""
    found = {}
    for name, (call, way) in REFUSED.items():
        try:
            measured(call(), way)
        except fastac.FastacError as error:
            found[name] = str(error)
    return found


def _written_where_autograd_looks(x: torch.Tensor) -> torch.Tensor:
    """No Function around it: torch's own op without a derivative, on what requires grad."""
    moved = _shard_dim(x)
    with torch.no_grad():
        moved.add_(1)
    return x * moved.detach().reshape(x.shape)


def _other_group(x: torch.Tensor) -> torch.Tensor:
    return _wait(_c10d.all_reduce(x, "sum", _second_group()))


@functools.cache
def _second_group() -> str:
    name: str = dist.new_group([0, 1]).group_name
    return name


def _function(op: Op) -> Op:
    return lambda x: _Differentiable.apply(x, op, _all_reduce)  # type: ignore[no-any-return]


def _third_is(other: Op, first: Op) -> Callable[[], Op]:
    """Calls: a dry run, the forward, the recompute. The recompute makes another."""

    def made() -> Op:
        calls = iter([first, first, other])
        return lambda x: _function(next(calls))(x)

    return made


REFUSED: dict[str, tuple[Callable[[], Op], str]] = {
    "another group": (_third_is(_other_group, _all_reduce), "tape"),
    "another op": (_third_is(_all_to_all, _all_reduce), "tape"),
    "other splits": (_third_is(functools.partial(_uneven, back=True), _uneven), "tape"),
    "other splits, nothing saved": (_third_is(functools.partial(_uneven, back=True), _uneven), "repeated"),
    "changed in place": (lambda: _written_where_autograd_looks, "tape"),
    "changed in place under sac": (lambda: _written_after, "sac"),
}


def test_errors(tmp_path: Path) -> None:
    """A recompute that communicates otherwise is an error on every rank, before it could hang."""
    for found in ranks.run(tmp_path, _errors, timeout=10):
        assert found.keys() == REFUSED.keys(), found
        for name in ("another group", "another op", "other splits", "other splits, nothing saved"):
            assert "collective 0 of recompute is not the one of the forward" in found[name], found[name]
        assert "was changed in place after it was saved" in found["changed in place"]
        assert "a saved output, of attention or a collective, was changed" in found["changed in place under sac"]


class Nested(torch.nn.Module):
    """A block in a checkpoint of its own, inside another with a collective before it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.region = Region(_late, way)
        self.outer = torch.nn.Linear(COLUMNS, COLUMNS)
        self.policy, self.engine = WAYS[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            moved = _function(_all_reduce)(torch.sin(self.outer(x)))
            inner: torch.Tensor = self.region(moved)
            return inner * torch.cos(moved)

        out: torch.Tensor = support.run_checkpointed(both, x, policy=self.policy, engine=self.engine)
        return out


def _nested_and_twice() -> tuple[dict[str, Measured], dict[str, Any]]:
    """Steps of nested regions, and of a graph that is gone through twice: gradients and collectives of the second."""
    nested, twice = {}, {}
    for way in ("none", "full", "tape"):
        model = Nested(way)
        with torch.no_grad():
            model.region.block(batch_of(0)["x"])
        nested[way] = steps.measured(model, batch_of(dist.get_rank()))
        region = Region(_several, way)
        with torch.no_grad():
            region.block(batch_of(0)["x"])
        x = batch_of(dist.get_rank())["x"]
        loss = region(x).square().sum()
        loss.backward(retain_graph=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as second:
            loss.backward()
        twice[way] = support.gradients(support.leaves_of(region, {"x": x})), steps.collectives(second).total()
    return nested, twice


def test_nested_regions_and_a_second_backward(tmp_path: Path) -> None:
    for nested, twice in ranks.run(tmp_path, _nested_and_twice):
        for way in ("full", "tape"):
            support.assert_same(nested[way].tensors, nested["none"].tensors)
            support.assert_same(twice[way][0], twice["none"][0])
        assert nested["tape"].collectives == nested["none"].collectives == (2, 2)
        assert nested["full"].collectives[1] > 2
        assert [twice[way][1] for way in ("none", "full", "tape")] == [1, 4, 1]


# Parameters that are gathered where they are used, as by SimpleFSDP


class _Unsharded(torch.nn.Module):
    """Casts a sharded parameter, and gathers it."""

    def forward(self, parameter: DTensor) -> torch.Tensor:
        whole: torch.Tensor = parameter.to(torch.bfloat16).redistribute(placements=[Replicate()]).to_local()
        return whole


class _InsideDTensor(LiveBytes):
    """Sees what DTensor does inside its ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _objects() -> dict[int, int]:
    """Bytes of the memory of every tensor that Python holds, by what tells it from others."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in plain]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _held(policy: str, gathered: bool) -> tuple[int, support.Tensors]:
    """Bytes that are held after the second forward, beside parameters and inputs; outputs and gradients."""
    model = support.stack(dtype=torch.float32 if gathered else torch.bfloat16, policy=policy)
    if gathered:
        mesh = init_device_mesh("cpu", (2,))
        for module in [module for module in model.modules() if list(module.parameters(recurse=False))]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter.detach().bfloat16().float(), mesh, [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(sharded))
                parametrize.register_parametrization(module, name, _Unsharded(), unsafe=True)
    batch = support.stack_inputs(dtype=torch.bfloat16)
    model(**batch).sum().backward()
    model.zero_grad(set_to_none=True)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    before = _objects()
    with _InsideDTensor([*local, *batch.values()]) as meter:
        outputs = model(**batch)
    # A copy that is made below the dispatcher no mode sees, but it is an object.
    copies = {key: size for key, size in _objects().items() if key not in before and key not in meter._alive}
    held = meter.now + sum(copies.values())
    outputs.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name.replace("parametrizations.", "").replace(".original", ""): grad for name, grad in gradients.items()}
    return held, {name: steps.whole(grad).bfloat16() for name, grad in found.items()} | {"output": outputs.detach()}


def _held_each_way() -> dict[tuple[str, bool], tuple[int, support.Tensors]]:
    return {
        (policy, gathered): _held(policy, gathered) for policy in ("torch", "attn_only") for gathered in (True, False)
    }


def check_gathered_parameters(folder: Path) -> None:
    """Held are block inputs, attention outputs and statistics: not a byte of what was gathered."""
    video = support.VIDEO_TOKENS * support.WIDTH * 2
    statistics = support.VIDEO_TOKENS * 2 * 4  # of two heads
    inputs, attention = 2 * video, 2 * 2 * (video + statistics)
    inputs += 2 * torch.get_rng_state().nbytes  # torch's checkpoint keeps it
    for found in ranks.run(folder, _held_each_way):
        held = {way: size for way, (size, _) in found.items()}
        assert held["torch", True] == held["torch", False] == inputs, f"held: {held}"
        assert held["attn_only", True] == held["attn_only", False] == inputs + attention, f"held: {held}"
        support.assert_same(found["attn_only", True][1], found["torch", True][1])


def test_gathered_parameters_are_not_held(tmp_path: Path) -> None:
    check_gathered_parameters(tmp_path)


# What ends outside of its region


def _waited_outside(policy: str) -> tuple[dict[str, torch.Tensor], int]:
    """A region returns what is not waited for yet; what comes after it waits, and then writes."""
    x = batch_of(dist.get_rank())["x"]
    made: list[collectives.Communication] = []
    original = collectives.Communication.__init__
    collectives.Communication.__init__ = lambda self: (made.append(self), original(self))[1]  # type: ignore[assignment]

    def region(x: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(torch.sin(x), [4, 4], [4, 4], _group())

    moved = support.run_checkpointed(region, x, policy=policy)
    assert isinstance(moved, functional.AsyncCollectiveTensor)
    assert all(not one.pending for one in made), "kept until the next forward"
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.cos(moved).sum().backward()
    assert bool(made) == (policy == "attn_only")
    events: Any = profiled.profiler.kineto_results  # type: ignore[union-attr]
    sent = sum(event.name() == "gloo:all_to_all" for event in events.events())
    return {"result": torch.Tensor(moved.trigger_wait().detach()), "gradient": x.grad}, sent


def test_a_result_that_is_waited_for_after_its_region(tmp_path: Path) -> None:
    found = {policy: ranks.run(tmp_path, _waited_outside, policy) for policy in ("none", "torch", "attn_only")}
    for rank in range(2):
        (expected, _), (full, _), (saved, _) = (found[policy][rank] for policy in found)
        support.assert_same(full, expected)
        support.assert_same(saved, expected)
    assert [found[policy][0][1] for policy in found] == [1, 1, 1], "torch's recompute ends before it would send again"


class Shards(torch.nn.Module):
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
    block: Any = Shards()
    if engine == "fsdp1":
        block = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
    else:
        for unit in (block.first, block.second):
            fully_shard(unit)
    with support.reported_blocks({"block": block}):
        support.loss_of(fastac.checkpoint(block, batch_of(dist.get_rank())["x"])).backward()
        (row,) = fastac.report(block).rows
    return row.saved, row.communication, row.writing


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_what_fsdp_gathers_for_itself_is_not_counted(engine: str, tmp_path: Path) -> None:
    """FSDP1's forward is around the model's own, whose collectives count."""
    assert ranks.run(tmp_path, _sharded, engine) == [(1, None, 1)] * 2


def _writing_later() -> list[int]:
    """Two blocks of a class, the second with a shorter attention: what is reported after each of three steps."""
    blocks = [Block(WRITING["all_reduce"], rows) for rows in (None, 2)]
    x = batch_of(dist.get_rank())["x"].detach()
    with torch.no_grad():
        for block in blocks:
            block(x)
    found = []
    for tokens in (ROWS, ROWS, ROWS // 2):
        for block in blocks:
            fastac.checkpoint(block, x[:tokens].clone().requires_grad_()).sum().backward()
        with support.reported_blocks({f"blocks.{i}": block for i, block in enumerate(blocks)}):
            found.append(fastac.report(blocks[0]).rows[0].writing)
    return found


def test_what_writes_a_buffer_is_reported_of_every_block(tmp_path: Path) -> None:
    """Only the first of a class is watched."""
    assert ranks.run(tmp_path, _writing_later) == [[2, 2, 2]] * 2


def test_what_is_sent_to_one_rank_is_never_saved() -> None:
    for name in ("isend", "irecv", "batch_p2p_ops", "all_reduce_"):
        assert collectives.writes_its_buffer(getattr(_c10d, name).default), name
    for op in (torch.ops.c10d.barrier.default, _c10d.all_reduce.default, torch.ops.aten.add_.Tensor):
        assert not collectives.writes_its_buffer(op), op
