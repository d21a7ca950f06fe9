"""Latte: blocks that attend within a frame and to the text take turns with blocks that attend across frames."""

from typing import Any

import torch

from fastac.models.reading import ModelRow


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "encoder_hidden_states": torch.randn(1, 8, 8),
        "timestep": torch.tensor([500]),
    }


ROWS = (
    ModelRow(
        class_name="LatteTransformer3DModel",
        containers=("transformer_blocks", "temporal_transformer_blocks"),
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 8,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 8,
            "video_length": 2,
        },
        inputs=_text_to_video_inputs,
    ),
)
