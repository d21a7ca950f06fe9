"""Training on several ranks, each with a part of the batch: FSDP2, DistributedDataParallel, FSDP1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.distributed import ranks
from tests.distributed.training import Setup, assert_trained_alike, on_each_rank
from tests.ways.recipes import HUNYUAN, LTX


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of a model's module lists, in their order."""
    return [block for child in model.children() if isinstance(child, torch.nn.ModuleList) for block in child]


def root(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    return fully_shard(model, **options)


def blocks(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def blocks_kept(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, reshard_after_forward=False)


def blocks_to_one(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, reshard_after_forward=1)


def blocks_in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def blocks_offloaded(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def every_linear(model: torch.nn.Module) -> torch.nn.Module:
    for block in blocks_of(model):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module)
    return blocks(model)


SHARDED = [
    Setup(root),
    Setup(blocks),
    Setup(blocks_kept),
    Setup(blocks_to_one),
    Setup(blocks_offloaded),
    Setup(every_linear),
    Setup(every_linear, name=LTX),
    Setup(blocks, name=HUNYUAN),
    Setup(blocks, order="enable, wrap"),
    Setup(every_linear, order="enable, wrap"),
]


def described(setup: Setup) -> str:
    name = setup.name.removesuffix("Transformer3DModel")
    return f"{name}-{setup.wrap.__name__}-{setup.order.replace(', ', '-')}"


@pytest.mark.parametrize("setup", SHARDED, ids=described)
def test_fully_shard(tmp_path: Path, setup: Setup) -> None:
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)
