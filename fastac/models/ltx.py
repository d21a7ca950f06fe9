"""LTX-Video: self-attention over the video, cross-attention over the text under a padding mask."""

from typing import Any

import torch

from fastac.models.reading import ModelRow


def _text_to_video_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[:, 12:] = False
    return {
        "hidden_states": torch.randn(2, 2 * 8 * 8, 4),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": mask,
        "num_frames": 2,
        "height": 8,
        "width": 8,
    }


ROWS = (
    ModelRow(
        class_name="LTXVideoTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        inputs=_text_to_video_inputs,
    ),
)
