"""accelerate's FSDP plugin, version 2, and its DDP: what two ranks compute is what one process does on both batches.

accelerate shards on no CPU of itself: it takes a process on one for MULTI_CPU, whatever plugin it gets. It is told here
that it has GPUs, after it has set up gloo.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from tests.conftest import forget_accelerate
from tests.distributed import ranks
from tests.distributed.steps import Setup, assert_trained_alike, on_each_rank


def parallel(model: Any) -> torch.nn.Module:
    forget_accelerate()
    return Accelerator(cpu=True).prepare(model)  # type: ignore[no-any-return]


def sharded(model: Any, **plugin: bool) -> torch.nn.Module:
    """The plugin puts the blocks into CheckpointWrappers if told so, which stay, and checkpoint as fastac says."""
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
    return model  # type: ignore[no-any-return]


checkpointed = functools.partial(sharded, activation_checkpointing=True)
offloaded = functools.partial(checkpointed, activation_checkpointing_offload=True)

SETUPS = {
    "ddp": Setup(parallel, order="enable, wrap"),
    "fsdp2": Setup(sharded, order="enable, wrap"),
    "fsdp2 with its wrappers, before": Setup(checkpointed, order="enable, wrap", plain=sharded),
    "fsdp2 with its wrappers, after": Setup(checkpointed, plain=sharded),
    "fsdp2 with its wrappers, offloaded": Setup(offloaded, plain=sharded),
}


@pytest.mark.parametrize("name", SETUPS)
def test_prepared_before_or_after_enable(name: str) -> None:
    setup = SETUPS[name]
    assert_trained_alike(ranks.run(on_each_rank, setup), setup)
