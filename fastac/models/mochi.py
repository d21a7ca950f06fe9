"""Mochi: one attention per sample, over its video and its valid text tokens."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    width = config["text_embed_dim"]
    # The model drops the text tokens that are not valid, sample by sample. All are valid here, the longest case.
    return inputs_of_text_to_video(config, video, text_width=width, times=video.dtype, mask=torch.bool)


def _default_video(config: Mapping[str, Any]) -> Video:
    text = config["max_sequence_length"]
    return Video(frames=163, height=480, width=848, text_tokens=text, compression=Compression(6, 8, 8))


ROWS = (ModelRow("MochiTransformer3DModel", video_inputs=_inputs_of_video, default_video=_default_video),)
