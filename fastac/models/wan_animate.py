"""Wan-Animate, with a face adapter outside the blocks, and Wan-Animate 2, which passes its blocks keyword arguments."""

from typing import Any

import torch

from fastac.models import wan
from fastac.models.reading import ModelRow


def _animate_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 12, 3, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "encoder_hidden_states_image": torch.randn(1, 4, 16),
        "pose_hidden_states": torch.randn(1, 4, 2, 8, 8),
        "face_pixel_values": torch.randn(1, 3, 5, 8, 8),
    }


def _reference_inputs() -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [torch.randn(4, 2, 8, 8)],
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": [torch.randn(6, 16)],
        "condition_latents": [torch.randn(8, 2, 8, 8)],
        "encoder_hidden_states_image": torch.randn(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 32,
        "offset_grid_sizes": torch.tensor([[2, 4, 4]]),
    }


ROWS = (
    ModelRow(
        class_name="WanAnimateTransformer3DModel",
        containers=("blocks",),
        config=wan.CONFIG
        | {
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 16,
            "motion_encoder_channel_sizes": {"4": 4, "8": 4},
            "motion_encoder_size": 8,
            "motion_style_dim": 4,
            "motion_dim": 3,
            "motion_encoder_dim": 6,
            "face_encoder_hidden_dim": 6,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        inputs=_animate_inputs,
    ),
    ModelRow(
        class_name="WanAnimate2Transformer3DModel",
        containers=("blocks",),
        config={
            "text_len": 8,
            "in_dim": 12,
            "dim": 16,
            "ffn_dim": 32,
            "freq_dim": 32,
            "text_dim": 16,
            "out_dim": 4,
            "num_heads": 2,
            "num_layers": 2,
        },
        inputs=_reference_inputs,
    ),
)
