"""Latte: blocks that attend within a frame and to the text alternate with blocks that attend across frames."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    inputs = inputs_of_text_to_video(config, video, text_width=config["caption_channels"], times=torch.int64)
    # This is the model's default. Without it the temporal blocks are skipped.
    return inputs | {"enable_temporal_attentions": True}


def _default_video(config: Mapping[str, Any]) -> Video:
    size = config["sample_size"] * 8
    # Its VAE is one of images and encodes every frame by itself.
    compression = Compression(1, 8, 8)
    return Video(frames=config["video_length"], height=size, width=size, text_tokens=120, compression=compression)


ROWS = (
    ModelRow(
        "LatteTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
