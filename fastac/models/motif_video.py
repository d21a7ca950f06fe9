"""Motif-Video: joint attention over video and text, then attention over the text alone; the last blocks decode."""

from typing import Any

import torch

from fastac.models.reading import ModelRow


def _image_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 9, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "encoder_attention_mask": (torch.arange(12) < 8).unsqueeze(0),
        "image_embeds": torch.randn(1, 3, 10),
    }


ROWS = (
    ModelRow(
        class_name="MotifVideoTransformer3DModel",
        containers=("transformer_blocks", "single_transformer_blocks"),
        config={
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_decoder_layers": 1,
            "text_embed_dim": 16,
            "image_embed_dim": 10,
            "rope_axes_dim": (4, 4, 4),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        inputs=_image_to_video_inputs,
    ),
)
