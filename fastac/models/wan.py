"""Wan 2.1 and 2.2, text to video: self-attention over the video and cross-attention over the text in every block."""

from typing import Any

import torch

from fastac.models.reading import ModelRow


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


ROWS = (
    ModelRow(
        class_name="WanTransformer3DModel",
        containers=("blocks",),
        config={
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
        },
        inputs=_text_to_video_inputs,
    ),
)
