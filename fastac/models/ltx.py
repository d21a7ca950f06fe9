"""LTX-Video, and LTX-2, whose blocks also attend from the video to the sound and back."""

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


def _audio_and_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 2 * 4 * 4, 4),
        "audio_hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "audio_encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
        "audio_encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 9,
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
    ModelRow(
        class_name="LTX2VideoTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8,
            "num_layers": 2,
            "caption_channels": 16,
        },
        inputs=_audio_and_video_inputs,
    ),
)
