"""Training on several ranks, each with a part of the batch: FSDP2, DistributedDataParallel, FSDP1, accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.engine import releases
from fastac.models import unwrapped
from tests import support
from tests.conftest import forget_accelerate
from tests.distributed.models import flat, sharded, sharded_inside
from tests.distributed.steps import Setup, assert_trained_alike
from tests.engine.simulated import simulated
from tests.ways.recipes import Batch, narrow


def adapted(model: Any) -> torch.nn.Module:
    """Adapters on a frozen model, as diffusers adds them."""
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    support.fill_zeros(model)
    return model


def on_two_by_two(model: Any) -> torch.nn.Module:
    return sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def prepared(model: Any) -> torch.nn.Module:
    forget_accelerate()
    return Accelerator(cpu=True).prepare(model)


def prepared_by_plugin(model: Any, **plugin: bool) -> torch.nn.Module:
    """By accelerate's FSDP plugin. With activation_checkpointing it puts blocks into CheckpointWrappers, which stay.

    accelerate does not shard on a CPU: it takes such a process for MULTI_CPU, whatever plugin it gets. So it is told,
    after it has set up gloo, that it has GPUs.
    """
    forget_accelerate()
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type = DistributedType.MULTI_GPU
    options: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **plugin}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    assert accelerator.is_fsdp2
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["WanTransformerBlock"]
    blocks = len(model.blocks)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    modules = list(model.modules())
    assert sum(isinstance(module, CheckpointWrapper) for module in modules) == (blocks if plugin else 0)
    assert sum(isinstance(module, FSDPModule) for module in modules) > blocks
    return model


with_wrappers = partial(prepared_by_plugin, activation_checkpointing=True)


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
    """The first of two blocks offloads."""
    if policy != "none":
        fastac.enable(model, fastac.Policy(policy, offload=True, keep=1))


@contextlib.contextmanager
def on_host(model: Any, last: bool) -> Iterator[None]:
    with simulated() as device:
        yield
    assert not device.faults
    assert bool(device.allocated) == fastac.report(model).active


SETUPS = {
    "fsdp2": Setup(sharded, policies=("none", "full", "attn_only")),
    "fsdp2, units inside blocks": Setup(sharded_inside, order="enable, wrap"),
    "fsdp2, accumulation": Setup(sharded, last=synchronized_last, micro_batches=2),
    "fsdp2, adapters": Setup(sharded, prepare=adapted),
    "fsdp2, offloaded": Setup(
        partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=False)
    ),
    "fsdp2, on the host": Setup(sharded, enable=with_host, last=on_host),
    "fsdp2, in bf16": Setup(partial(sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))),
    "fsdp2, 2 x 2 ranks": Setup(on_two_by_two, world=4),
    "fsdp2, compiled blocks": Setup(sharded, enable=compile_blocks, compiles=True),
    "fsdp1": Setup(flat),
    "ddp": Setup(DistributedDataParallel, last=without_sync, micro_batches=2, policies=("none", "full", "attn_only")),
    "ddp, static graph": Setup(
        partial(DistributedDataParallel, static_graph=True, gradient_as_bucket_view=True), order="enable, wrap"
    ),
    "ddp, adapters": Setup(partial(DistributedDataParallel, find_unused_parameters=True), prepare=adapted),
    "ddp, replicate": Setup(replicate),
    "accelerate, ddp": Setup(prepared, order="enable, wrap"),
    "accelerate, fsdp2": Setup(prepared_by_plugin, order="enable, wrap"),
    "accelerate, fsdp2 with its wrappers": Setup(with_wrappers, order="enable, wrap", plain=prepared_by_plugin),
    "accelerate, fsdp2 with its wrappers, offloaded": Setup(
        partial(with_wrappers, activation_checkpointing_offload=True), plain=prepared_by_plugin
    ),
}
MARKS = {
    "fsdp2, in bf16": pytest.mark.skipif(
        releases.is_at_least("2.10") and not releases.is_at_least("2.13"),
        reason="does not cast the inputs again, and raises CheckpointError without fastac as well",
    ),
    "fsdp2, 2 x 2 ranks": pytest.mark.slow,
    "fsdp2, compiled blocks": pytest.mark.slow,
    "accelerate, fsdp2": pytest.mark.slow,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SETUPS])
def test_each_engine(name: str) -> None:
    assert_trained_alike(SETUPS[name])


def uneven(batch: Batch, rank: int) -> Batch:
    """Another video size for rank 1, whose video requires grad."""
    if rank == 0:
        return batch
    batch = narrow(batch)
    return batch | {"hidden_states": batch["hidden_states"].requires_grad_()}


def test_ranks_that_recompute_unequally() -> None:
    assert_trained_alike(Setup(sharded, data=uneven, policies=("none", "attn_only", "attn_only|full")))
