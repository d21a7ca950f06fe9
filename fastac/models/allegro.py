"""Allegro: attention over the video, then over the text, by processors that ignore the backend."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 16, 8),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    patch = (config["patch_size_t"], config["patch_size"], config["patch_size"])
    latents = video.latents(patch)
    grid = (latents[0], latents[1] // patch[1], latents[2] // patch[2])
    angles = [torch.ones(size, config["attention_head_dim"] // 3) for size in grid]
    places = torch.cartesian_prod(*map(torch.arange, grid)).T.reshape(3, 1, -1).contiguous()
    return {
        "hidden_states": video.features(config["in_channels"], *latents),
        "encoder_hidden_states": video.features(1, video.text_tokens, config["caption_channels"]),
        "encoder_attention_mask": video.text_mask(torch.int64),
        "timestep": video.times(torch.float32),
        "image_rotary_emb": (tuple((cosine, cosine - 1) for cosine in angles), tuple(places)),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(
        frames=config["sample_frames"] * 4,
        height=config["sample_height"] * 8,
        width=config["sample_width"] * 8,
        text_tokens=512,
        compression=Compression(4, 8, 8, first_alone=False),
    )


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
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
