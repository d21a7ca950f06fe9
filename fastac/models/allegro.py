"""Allegro: attention over the video, then over the text. Its processors ignore the backend."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video, patch_of


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    width = config["caption_channels"]
    inputs = inputs_of_text_to_video(config, video, text_width=width, times=torch.float32, mask=torch.int64)
    # Allegro's pipeline passes text as (batch, 1, tokens, width).
    inputs["encoder_hidden_states"].unsqueeze_(1)
    patch = patch_of(config)
    grid = [size // step for size, step in zip(video.latents(patch), patch, strict=True)]
    # Frames, rows and columns each rotate a third of a head. Cosine 1 and sine 0 rotate by nothing.
    angles = [torch.ones(size, config["attention_head_dim"] // 3) for size in grid]
    places = torch.cartesian_prod(*map(torch.arange, grid)).T.reshape(3, 1, -1).contiguous()
    return inputs | {"image_rotary_emb": (tuple((cosine, cosine - 1) for cosine in angles), tuple(places))}


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(
        frames=config["sample_frames"] * 4,
        height=config["sample_height"] * 8,
        width=config["sample_width"] * 8,
        text_tokens=512,
        # Unlike most video VAEs, Allegro's compresses the first frame together with the next ones.
        compression=Compression(4, 8, 8, first_alone=False),
    )


ROWS = (
    ModelRow(
        "AllegroTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
