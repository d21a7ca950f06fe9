"""NeMo Automodel 0.7.0: its parallelizer puts CheckpointWrappers and FSDP2 around the blocks of a diffusers model."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.backends import packages
from tests.trainers.training import OfDiffusers

packages.use("nemo_automodel")

from nemo_automodel._diffusers.parallelization import WanModelParallelizer


@pytest.fixture(autouse=True, scope="module")
def _process_group() -> Any:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class TestWan(OfDiffusers):
    name, attention = "WanTransformer3DModel", 4

    def parallelized(self, activation_checkpointing: bool) -> Any:
        mesh = init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
        return WanModelParallelizer()._apply(
            super().model(), mesh, MixedPrecisionPolicy(), activation_checkpointing=activation_checkpointing
        )

    def model(self) -> Any:
        return self.parallelized(False)

    def switched_on(self) -> Any:
        return self.parallelized(True)
