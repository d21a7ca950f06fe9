"""Kandinsky 5, whose text blocks are checkpointed too."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, patch_of


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Kandinsky 5 with dense attention, for texts of one length."""
    if config["attention_type"] != "regular":
        raise FastacError(
            f"video: Kandinsky 5 with attention_type {config['attention_type']!r} needs a block mask and is not known "
            "here. Use attention_type 'regular'."
        )
    patch = patch_of(config)
    latents = video.latents(patch)
    channels = config["in_visual_dim"]
    if config["visual_cond"]:
        # Latents, the condition, and a mask of the frames that have a condition.
        channels = 2 * channels + 1
    return {
        "hidden_states": video.features(*latents, channels),
        "encoder_hidden_states": video.features(video.text_tokens, config["in_text_dim"]),
        "pooled_projections": video.features(config["in_text_dim2"]),
        "timestep": video.times(video.dtype),
        # Positions count patches, not latents.
        "visual_rope_pos": [torch.arange(size // step) for size, step in zip(latents, patch, strict=True)],
        "text_rope_pos": torch.arange(video.text_tokens),
        "return_dict": False,
    }


ROWS = (
    ModelRow(
        "Kandinsky5Transformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=121, height=512, width=768, text_tokens=512, compression=Compression(4, 8, 8)),
    ),
)
