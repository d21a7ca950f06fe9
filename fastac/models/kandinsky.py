"""Kandinsky 5 and 6, whose text blocks are checkpointed as well, and the super-resolution of 6, which is flex alone."""

from typing import Any

import torch

from fastac.models.reading import ModelRow

CONFIG = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": 16,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 2, 2),
}


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 2, 8, 8, 4),
        "encoder_hidden_states": torch.randn(1, 6, 24),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": torch.randn(1, 8),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(6),
    }


def _audio_and_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 2, 8, 8, 9),
        "encoder_hidden_states": torch.randn(1, 6, 24),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([500.0]),
        "audio_hidden_states": torch.randn(1, 5, 4),
        "encoder_attention_mask": (torch.arange(6) < 4).unsqueeze(0),
    }


def _super_resolution_inputs() -> dict[str, Any]:
    return {"hidden_states": torch.randn(1, 1, 16, 16, 9), "timestep": torch.tensor([500.0])}


ROWS = (
    ModelRow(
        class_name="Kandinsky5Transformer3DModel",
        containers=("text_transformer_blocks", "visual_transformer_blocks"),
        config=CONFIG,
        inputs=_text_to_video_inputs,
    ),
    ModelRow(
        class_name="Kandinsky6Transformer3DModel",
        containers=("video_text_transformer_blocks", "audio_text_transformer_blocks", "visual_transformer_blocks"),
        config=CONFIG | {"in_audio_dim": 4, "out_audio_dim": 4},
        inputs=_audio_and_video_inputs,
    ),
    ModelRow(
        class_name="Kandinsky6SRTransformer3DModel",
        containers=("visual_transformer_blocks",),
        config={
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 16,
            "ff_dim": 32,
            "num_visual_blocks": 2,
            "axes_dims": (4, 2, 2),
        },
        inputs=_super_resolution_inputs,
        flex=True,
    ),
)
