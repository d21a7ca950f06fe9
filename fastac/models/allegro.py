"""Allegro: attention over the video, then over the text, by processors that ignore the backend."""

from typing import Any

import torch

from fastac.models.reading import ModelRow


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 16, 8),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
    }


ROWS = (
    ModelRow(
        class_name="AllegroTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        inputs=_text_to_video_inputs,
    ),
)
