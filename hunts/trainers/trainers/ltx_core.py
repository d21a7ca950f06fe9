"""ltx-core 1.0.0, the package of the LTX-2 trainer: torch's checkpoint in its forward, behind a flag of its own."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends import packages
from tests.trainers.training import Training

packages.use("ltx_core")

from ltx_core.guidance.perturbations import BatchedPerturbationConfig
from ltx_core.model.transformer.modality import Modality
from ltx_core.model.transformer.model import LTXModel


class TestLTX2(Training):
    attention = 12  # in each of two blocks: video, audio, the text in each, one in the other

    def make(self) -> torch.nn.Module:
        video = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
        audio = video | {"attention_head_dim": 6}
        return LTXModel(
            **video,
            **{f"audio_{name}": value for name, value in audio.items()},
            num_layers=2,
            cross_attention_dim=24,
            audio_cross_attention_dim=12,
        )

    def inputs(self) -> dict[str, Any]:
        def modality(tokens: int, width: int, axes: int) -> Modality:
            return Modality(
                latent=torch.randn(1, tokens, 4),
                sigma=torch.tensor([0.5]),
                timesteps=torch.full((1, tokens), 0.5),
                positions=torch.rand(1, axes, tokens, 2),
                context=torch.randn(1, 6, width),
            )

        video, audio = modality(24, 24, 3), modality(8, 12, 1)
        return {"video": video, "audio": audio, "perturbations": BatchedPerturbationConfig.empty(1)}

    def switch_on(self, model: Any) -> None:
        model.set_gradient_checkpointing(True)
