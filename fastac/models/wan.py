"""Wan 2.1 and 2.2 and what is built like it: attention over the video, then over text and image, in every block."""

from typing import Any

import torch

from fastac.models.reading import ModelRow

CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
IMAGE = {"image_dim": 16, "added_kv_proj_dim": 24}
TEXT_TOKENS = 512  # the attention takes what is before the last 512 tokens for the image


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def _short_video_inputs() -> dict[str, Any]:
    return _text_to_video_inputs() | {"hidden_states": torch.randn(1, 4, 2, 8, 8)}


def _image_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 16),
        "encoder_hidden_states_image": torch.randn(1, 5, 16),
    }


def _control_inputs() -> dict[str, Any]:
    return _short_video_inputs() | {"control_hidden_states": torch.randn(1, 12, 2, 8, 8)}


def _diffusion_forcing_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 4, 8, 8),
        "timestep": torch.tensor([[500, 500, 300, 300]]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "enable_diffusion_forcing": True,
        "fps": [1],
    }


ROWS = (
    ModelRow(
        class_name="WanTransformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_text_to_video_inputs,
    ),
    ModelRow(
        class_name="WanTransformer3DModel",
        variant="i2v",
        containers=("blocks",),
        config=CONFIG | IMAGE,
        inputs=_image_to_video_inputs,
    ),
    ModelRow(
        class_name="WanVACETransformer3DModel",
        containers=("blocks", "vace_blocks"),
        config=CONFIG | {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 12},
        inputs=_control_inputs,
    ),
    ModelRow(
        class_name="ChronoEditTransformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_short_video_inputs,
    ),
    ModelRow(
        class_name="SkyReelsV2Transformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_short_video_inputs,
    ),
    ModelRow(
        class_name="SkyReelsV2Transformer3DModel",
        variant="diffusion_forcing",
        containers=("blocks",),
        config=CONFIG | {"num_frame_per_block": 2, "inject_sample_info": True},
        inputs=_diffusion_forcing_inputs,
    ),
)
