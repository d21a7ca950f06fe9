"""The same on GPUs with NCCL, where there are any: one rank for each of two, or one alone. On a CPU with gloo."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import init_device_mesh

import fastac
from fastac.engine import releases
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import sharded
from tests.ways.recipes import WAN, build

ATTENTION = tuple(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
POLICIES = ("none", "full", "attn_only")


def _steps(engine: str, device: str) -> dict[str, steps.Measured]:
    found = {}
    world = dist.get_world_size()
    for policy in POLICIES:
        model, batch = build(WAN, torch.bfloat16)
        model = model.to(device, torch.bfloat16)  # all of it: FSDP wants one dtype
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        if policy != "none":
            fastac.enable(model, policy)
        if engine == "fsdp2":
            sharded(model, mesh=init_device_mesh(device, (world,)))
        else:
            with ranks.one_accelerator() if device == "cpu" else contextlib.nullcontext():
                model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
        for _ in range(2):
            found[policy] = steps.measured(model, batch, attention=(*ATTENTION, support.CPU_ATTENTION))
        found[policy].tensors = {name: tensor.cpu() for name, tensor in found[policy].tensors.items()}
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("engine", ["fsdp2", "ulysses"])
def test_wan(engine: str, device: str) -> None:
    world = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    if engine == "ulysses":
        pytest.importorskip("transformers")  # whose import gives loggers a method that diffusers 0.42 calls
        if world == 1:
            pytest.skip("not run on GPUs: Ulysses needs two")
    backend = "gloo" if device == "cpu" else "nccl"
    for found in ranks.run(_steps, engine, device, world=world, backend=backend):
        none, full, saved = (found[policy] for policy in POLICIES)
        assert none.attention[0] > 0
        assert saved.attention == none.attention
        assert full.attention[1] == none.attention[1] + none.attention[0]
        if device == "cuda" or releases.is_at_least("2.12"):  # older ones lose collectives of gloo's now and then
            assert saved.backward == none.backward
            assert world == 1 or none.backward
        for name, tensor in none.tensors.items():
            assert support.relative_error(saved.tensors[name], tensor) < 1e-2, name
