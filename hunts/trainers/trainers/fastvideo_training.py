"""FastVideo 0.2.1: CheckpointWrappers around the blocks of its own Wan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hunts.trainers.absent import absent
from tests.backends import packages
from tests.backends.flash_on_cpu import package
from tests.models.tiny import TINY
from tests.support import Tensors
from tests.trainers.training import Training

packages.use("fastvideo_training")
for _name in ("fastvideo", "fastvideo.training", "fastvideo.models", "fastvideo.models.dits"):
    package(_name)  # pipelines, and a GPU for attention
# What serves, reads videos and debugs.
absent("cloudpickle", "imageio", "torchvision", "torchvision.utils", "remote_pdb")

from fastvideo.configs.models.dits import WanVideoConfig
from fastvideo.configs.models.dits.wanvideo import WanVideoArchConfig
from fastvideo.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    maybe_init_distributed_environment_and_model_parallel,
)
from fastvideo.forward_context import set_forward_context
from fastvideo.models.dits.wanvideo import WanTransformer3DModel
from fastvideo.platforms.cpu import CpuPlatform
from fastvideo.training.activation_checkpoint import apply_activation_checkpointing

# Its platform for CPUs knows no attention; those for GPUs give this where there is no flash-attn.
CpuPlatform.get_attn_backend_cls = staticmethod(lambda *chosen: "fastvideo.attention.backends.sdpa.SDPABackend")


@pytest.fixture(autouse=True, scope="module")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("fastvideo") / "store"
    maybe_init_distributed_environment_and_model_parallel(1, 1, distributed_init_method=f"file://{store}")
    yield
    cleanup_dist_env_and_memory()


class TestWan(Training):
    attention = 4

    def make(self) -> torch.nn.Module:
        config = TINY["WanTransformer3DModel"].config
        arch = WanVideoArchConfig(**{name: size for name, size in config.items() if name != "rope_max_seq_len"})
        return WanTransformer3DModel(WanVideoConfig(arch_config=arch), hf_config={})

    def inputs(self) -> dict[str, Any]:
        return TINY["WanTransformer3DModel"].inputs()

    def step(self, model: Any) -> tuple[Tensors, int]:
        with set_forward_context(current_timestep=0, attn_metadata=None):  # around the backward too, as its trainers
            return super().step(model)

    def switch_on(self, model: Any) -> None:
        apply_activation_checkpointing(model, "full")
