"""Sana-Video: linear attention over the video, without a kernel, and softmax attention to the text."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    width = config["caption_channels"]
    return inputs_of_text_to_video(config, video, text_width=width, times=torch.int64, mask=torch.int64)


ROWS = (
    ModelRow(
        "SanaVideoTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=81, height=480, width=832, text_tokens=300, compression=Compression(4, 8, 8)),
    ),
)
