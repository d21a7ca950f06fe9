"""torchtitan 0.3.0: CheckpointWrappers around the blocks of its own Flux."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastac
from hunts.trainers.absent import absent
from tests.backends import packages
from tests.trainers.training import Training

packages.use("torchtitan")
# The command line, a data loader, kernels for mixtures of experts.
absent("tyro", "torchtitan.models.flux.flux_datasets", "torchtitan.distributed.minimal_async_ep")

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import flux
from torchtitan.models.common.linear import Linear
from torchtitan.models.flux.model.layers import EmbedND, LastLayer, MLPEmbedder
from torchtitan.models.flux.parallelize import apply_ac

WIDTH, HEADS, AXES = 24, 2, (4, 4, 4)


def linear(inputs: int, outputs: int = WIDTH) -> Any:
    return Linear.Config(in_features=inputs, out_features=outputs, bias=True, param_init=flux._XAVIER_LINEAR)


def embedder(inputs: int) -> Any:
    return MLPEmbedder.Config(in_dim=inputs, hidden_dim=WIDTH, in_layer=linear(inputs), out_layer=linear(WIDTH))


class TestFlux(Training):
    attention = 4
    blocks = ("double_blocks", "single_blocks")

    def make(self) -> torch.nn.Module:
        last = {"linear": linear(WIDTH, 4), "adaln_linear": linear(WIDTH, 2 * WIDTH)}
        parts = {
            "img_in": linear(4),
            "txt_in": linear(8),
            "pe_config": EmbedND.Config(dim=WIDTH // HEADS, theta=10_000, axes_dim=AXES),
            "time_in_config": embedder(256),
            "vector_in_config": embedder(6),
            "final_layer_config": LastLayer.Config(hidden_size=WIDTH, patch_size=1, out_channels=4, **last),
            "double_blocks": [flux._make_double_block_config(WIDTH, HEADS, 2.0, True) for _ in range(2)],
            "single_blocks": [flux._make_single_block_config(WIDTH, HEADS, 2.0) for _ in range(2)],
        }
        sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "axes_dim": AXES}
        return flux.FluxModel.Config(**sizes, **parts, clip_encoder=None, t5_encoder=None).build()

    def inputs(self) -> dict[str, Any]:
        image = {"img": torch.randn(1, 16, 4), "img_ids": torch.rand(1, 16, 3)}
        text = {"txt": torch.randn(1, 6, 8), "txt_ids": torch.zeros(1, 6, 3)}
        return {**image, **text, "timesteps": torch.tensor([0.5]), "y": torch.randn(1, 6)}

    def switch_on(self, model: Any) -> None:
        apply_ac(model)

    def wrap(self, model: Any, policy: Any) -> None:
        """What the policies of its other models do to `layers`."""
        for blocks in (model.double_blocks, model.single_blocks):
            for name, block in blocks.named_children():
                blocks.register_module(name, policy._wrap_block(block))

    def test_full(self) -> None:
        """Without early stop, which is nothing to fastac."""
        model = self.model()
        self.wrap(model, FullAC.Config().build())
        self.expect(model, again=self.attention)
        fastac.enable(model, blocks=self.blocks)
        self.expect(model)

    def test_selective_is_refused(self) -> None:
        """It is a context_fn, which would do the saving."""
        model = self.model()
        self.wrap(model, SelectiveAC.Config().build())
        with pytest.raises(fastac.FastacError, match=r"CheckpointWrapper.*context_fn"):
            fastac.enable(model, blocks=self.blocks)
        with fastac.patch_checkpoint():
            model = self.model()
            self.wrap(model, SelectiveAC.Config().build())
            with pytest.raises(fastac.FastacError, match="context_fn"):
                self.step(model)
