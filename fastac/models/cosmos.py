"""Cosmos 1; Cosmos 2 and 2.5 are of the same class."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Cosmos 1 only: Cosmos 2 and 2.5 have another VAE and other inputs."""
    if config["extra_pos_embed_type"] is None:
        raise FastacError("video: only Cosmos 1 of this class is known here; it has an extra_pos_embed_type.")
    inputs = inputs_of_text_to_video(config, video, text_width=config["text_embed_dim"], times=video.dtype)
    # The default of the pipeline (diffusers 0.42).
    inputs["fps"] = 30
    if config["concat_padding_mask"]:
        # The pipeline passes one mask of pixels for the whole batch, without any padding.
        inputs["padding_mask"] = torch.zeros(1, 1, video.height, video.width, dtype=video.dtype)
    return inputs


ROWS = (
    ModelRow(
        "CosmosTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=121, height=704, width=1280, text_tokens=512, compression=Compression(8, 8, 8)),
    ),
)
