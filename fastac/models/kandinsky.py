"""Kandinsky 5 and 6, whose text blocks are checkpointed as well, and the super-resolution of 6, which is flex alone."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

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


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Of Kandinsky 5 with dense attention, for one text or several of one length."""
    if config["attention_type"] != "regular":
        raise FastacError(
            f"video: Kandinsky 5 with attention_type {config['attention_type']!r}, which asks for a mask of blocks, is "
            "not known here. The one that is known is 'regular'."
        )
    patch = tuple(config["patch_size"])
    latents = video.latents(patch)
    channels = config["in_visual_dim"]
    if config["visual_cond"]:
        channels = 2 * channels + 1  # the latents, those of the condition, and where it holds
    return {
        "hidden_states": video.features(*latents, channels),
        "encoder_hidden_states": video.features(video.text_tokens, config["in_text_dim"]),
        "pooled_projections": video.features(config["in_text_dim2"]),
        "timestep": video.times(video.dtype),
        "visual_rope_pos": [torch.arange(size // step) for size, step in zip(latents, patch, strict=True)],
        "text_rope_pos": torch.arange(video.text_tokens),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=121, height=512, width=768, text_tokens=512, compression=Compression(4, 8, 8))


ROWS = (
    ModelRow(
        class_name="Kandinsky5Transformer3DModel",
        containers=("text_transformer_blocks", "visual_transformer_blocks"),
        config=CONFIG,
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
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
