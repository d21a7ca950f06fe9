"""Mochi: one attention per sample, over its video and those of its text tokens that are valid."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    latents = video.latents((1, config["patch_size"], config["patch_size"]))
    return {
        "hidden_states": video.features(config["in_channels"], *latents),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "timestep": video.times(video.dtype),
        "encoder_attention_mask": video.text_mask(torch.bool),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    text = config["max_sequence_length"]
    return Video(frames=163, height=480, width=848, text_tokens=text, compression=Compression(6, 8, 8))


ROWS = (
    ModelRow(
        class_name="MochiTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
        },
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
