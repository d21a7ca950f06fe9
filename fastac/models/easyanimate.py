"""EasyAnimate: joint attention over video and text, with weights of its own for the text in the first blocks alone."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "timestep": torch.tensor([500, 300]),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "encoder_hidden_states_t5": torch.randn(2, 4, 12),
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    latents = video.latents((1, config["patch_size"], config["patch_size"]))
    return {
        "hidden_states": video.features(config["in_channels"], *latents),
        "timestep": video.times(video.dtype),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=49, height=512, width=512, text_tokens=256, compression=Compression(4, 8, 8))


ROWS = (
    ModelRow(
        class_name="EasyAnimateTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "text_embed_dim_t5": 12,
        },
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
