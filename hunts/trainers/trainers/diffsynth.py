"""DiffSynth-Studio 2.1.12: its pipelines' functions call blocks through its own gradient_checkpoint_forward."""

from __future__ import annotations

from typing import Any

import torch

import fastac
from hunts.trainers.absent import absent
from tests.backends import packages
from tests.trainers.training import Training

packages.use("diffsynth")
# Images, tables and texts are read with these, and weights fetched.
absent("torchvision", "torchvision.transforms", "imageio", "imageio.v3", "pandas", "modelscope", "ftfy")

from diffsynth.models.wan_video_dit import WanModel
from diffsynth.pipelines.wan_video import model_fn_wan_video


class Pipeline(torch.nn.Module):
    """What a step of DiffSynth's training module runs: options and all."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"dim": 24, "in_dim": 4, "ffn_dim": 32, "out_dim": 4, "text_dim": 16, "freq_dim": 64}
        layers = {"num_heads": 2, "num_layers": 2, "patch_size": (1, 2, 2), "has_image_input": False}
        self.dit = WanModel(**sizes, **layers, eps=1e-6)
        self.options: dict[str, bool] = {}

    def forward(self, **inputs: Any) -> Any:
        return model_fn_wan_video(dit=self.dit, **inputs, **self.options)


class TestWan(Training):
    attention = 4

    def make(self) -> torch.nn.Module:
        return Pipeline()

    def inputs(self) -> dict[str, Any]:
        latents, context = torch.randn(1, 4, 3, 16, 16), torch.randn(1, 12, 16)
        return {"latents": latents, "timestep": torch.tensor([500.0]), "context": context}

    def host(self, model: Any) -> Any:
        return model.dit

    def switch_on(self, model: Any) -> None:
        model.options = {"use_gradient_checkpointing": True}

    def test_offload(self) -> None:
        """save_on_cpu around its checkpoints."""
        model = self.model()
        model.options = {"use_gradient_checkpointing_offload": True}
        self.expect(model, again=self.attention)
        with fastac.patch_checkpoint():
            self.expect(model)
