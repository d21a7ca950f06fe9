"""The same on GPUs with NCCL, where there are any: one rank for each of two, or one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import sharded
from tests.ways.recipes import WAN, build

pytestmark = pytest.mark.gpu

ATTENTION = tuple(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
POLICIES = ("none", "full", "attn_only")


def _steps(engine: str) -> dict[str, steps.Measured]:
    found = {}
    for policy in POLICIES:
        model, batch = build(WAN, torch.bfloat16)
        model: Any = model.cuda()
        batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        if policy != "none":
            fastac.enable(model, policy)
        if engine == "fsdp2":
            sharded(model)
        else:
            world = torch.distributed.get_world_size()
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
        for _ in range(2):
            found[policy] = steps.measured(model, batch, attention=ATTENTION)
        found[policy].tensors = {name: tensor.cpu() for name, tensor in found[policy].tensors.items()}
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "ulysses"])
def test_wan(engine: str) -> None:
    world = min(2, torch.cuda.device_count())
    for found in ranks.results(ranks.outcomes(_steps, engine, world=world, backend="nccl")):
        none, full, saved = (found[policy] for policy in POLICIES)
        assert saved.attention == none.attention
        assert full.attention[1] == none.attention[1] + none.attention[0]
        assert saved.backward == none.backward
        for name, tensor in none.tensors.items():
            assert support.relative_error(saved.tensors[name], tensor) < 1e-2, name
