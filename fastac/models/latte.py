"""Latte: blocks that attend within a frame and to the text take turns with blocks that attend across frames."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "encoder_hidden_states": torch.randn(1, 8, 8),
        "timestep": torch.tensor([500]),
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    latents = video.latents((1, config["patch_size"], config["patch_size"]))
    if latents[0] not in (1, config["video_length"]):
        raise FastacError(
            f"video: frames {video.frames}, but this model has positions for {config['video_length']}. Use these, or 1."
        )
    return {
        "hidden_states": video.features(config["in_channels"], *latents),
        "encoder_hidden_states": video.features(video.text_tokens, config["caption_channels"]),
        "timestep": video.times(torch.int64),
        "enable_temporal_attentions": True,
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    size = config["sample_size"] * 8
    compression = Compression(1, 8, 8)  # its VAE is one for images
    return Video(frames=config["video_length"], height=size, width=size, text_tokens=120, compression=compression)


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
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
