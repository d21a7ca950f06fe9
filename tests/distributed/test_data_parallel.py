"""Training on several ranks, each with a part of the batch: FSDP2, DistributedDataParallel, FSDP1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.engine import releases
from fastac.models import unwrapped
from tests import support
from tests.distributed import ranks
from tests.distributed.models import sharded, sharded_inside
from tests.distributed.steps import Setup, assert_trained_alike, on_each_rank
from tests.engine.simulated import simulated
from tests.ways.recipes import Batch, narrow


def adapted(model: Any) -> torch.nn.Module:
    """Adapters on a frozen model, as diffusers adds them."""
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    support.fill_zeros(model)
    return model


def offloaded(model: Any) -> torch.nn.Module:
    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=False)


def in_bf16(model: Any) -> torch.nn.Module:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def on_two_by_two(model: Any) -> torch.nn.Module:
    return sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def flat(model: Any) -> torch.nn.Module:
    """With its original parameters beside the flat ones: Wan's forward asks them for their dtype."""
    units = ModuleWrapPolicy({type(model.blocks[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=True)


def parallel(model: Any) -> torch.nn.Module:
    return DistributedDataParallel(model)


def static(model: Any) -> torch.nn.Module:
    return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)


def unused(model: Any) -> torch.nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def replicated(model: Any) -> torch.nn.Module:
    return replicate(model)


def synchronized_last(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def without_sync(model: Any, last: bool) -> Any:
    return None if last else model.no_sync()


def compile_blocks(model: Any, policy: str) -> None:
    if policy == "none":
        for block in unwrapped(model).blocks:
            block.compile(backend="aot_eager")
    else:
        fastac.compile(model, policy, backend="aot_eager")


def with_host(model: Any, policy: str) -> None:
    """What the first of two blocks keeps goes to the host."""
    if policy != "none":
        fastac.enable(model, fastac.Policy(policy, offload=True, keep=1))


@contextlib.contextmanager
def on_host(model: Any, last: bool) -> Iterator[None]:
    with simulated() as device:
        yield
    assert not device.faults
    assert bool(device.allocated) == fastac.report(model).active


SETUPS = {
    "fsdp2": Setup(sharded),
    "fsdp2, units inside blocks": Setup(sharded_inside, order="enable, wrap"),
    "fsdp2, accumulation": Setup(sharded, last=synchronized_last, micro_batches=2),
    "fsdp2, adapters": Setup(sharded, prepare=adapted),
    "fsdp2, offloaded": Setup(offloaded),
    "fsdp2, on the host": Setup(sharded, enable=with_host, last=on_host),
    "ddp": Setup(parallel, last=without_sync, micro_batches=2),
    "ddp, static graph": Setup(static, order="enable, wrap"),
    "ddp, adapters": Setup(unused, prepare=adapted),
    "ddp, replicate": Setup(replicated),
    "ddp, on the host": Setup(parallel, enable=with_host, last=on_host),
}


@pytest.mark.parametrize("name", SETUPS)
def test_each_engine(name: str) -> None:
    setup = SETUPS[name]
    policies = ("none", "full", "attn_only") if name in ("fsdp2", "ddp") else ("none", "attn_only")
    assert_trained_alike(ranks.run(on_each_rank, setup, policies), setup)


def test_fsdp1() -> None:
    setup = Setup(flat)
    assert_trained_alike(ranks.run(on_each_rank, setup), setup, shards=True)


@pytest.mark.skipif(
    releases.is_at_least("2.10") and not releases.is_at_least("2.13"),
    reason="does not cast the inputs again, and raises CheckpointError without fastac as well",
)
def test_fsdp2_in_bf16() -> None:
    setup = Setup(in_bf16)
    assert_trained_alike(ranks.run(on_each_rank, setup), setup, rounding=0.1)


@pytest.mark.slow
def test_fsdp2_on_two_by_two_ranks() -> None:
    setup = Setup(on_two_by_two, world=4)
    assert_trained_alike(ranks.run(on_each_rank, setup, world=4), setup)


@pytest.mark.slow
def test_fsdp2_of_compiled_blocks() -> None:
    setup = Setup(sharded, enable=compile_blocks, compiles=True)
    assert_trained_alike(ranks.run(on_each_rank, setup), setup)


def uneven(batch: Batch, rank: int) -> Batch:
    """Another video size for rank 1, whose video requires grad."""
    if rank == 0:
        return batch
    batch = narrow(batch)
    return batch | {"hidden_states": batch["hidden_states"].requires_grad_()}


def test_ranks_that_recompute_unequally() -> None:
    setup = Setup(sharded, data=uneven)
    policies = ("none", "attn_only", "attn_only|full")
    assert_trained_alike(ranks.run(on_each_rank, setup, policies), setup)
