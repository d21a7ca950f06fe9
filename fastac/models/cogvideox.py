"""CogVideoX and 1.5: joint attention over video and text. Their processors ignore the backend."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    patch = config["patch_size"]
    frames, height, width = video.latents((1, patch, patch))
    # CogVideoX 1.5 pads the latents to whole patches, and drops the padding.
    frames += -frames % (config["patch_size_t"] or 1)
    inputs = {
        "hidden_states": video.features(frames, config["in_channels"], height, width),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "timestep": video.times(torch.int64),
        "return_dict": False,
    }
    # 5B rotates by position; 2B does not. Cosine 1 and sine 0 rotate by nothing.
    if config["use_rotary_positional_embeddings"]:
        tokens = frames // (config["patch_size_t"] or 1) * (height // patch) * (width // patch)
        shape = (tokens, config["attention_head_dim"])
        inputs["image_rotary_emb"] = (torch.ones(shape), torch.zeros(shape))
    # The pipeline for images always passes 2.0 (diffusers 0.42).
    if config["ofs_embed_dim"] is not None:
        inputs["ofs"] = torch.full((1,), 2.0, dtype=video.dtype)
    return inputs


def _default_video(config: Mapping[str, Any]) -> Video:
    """The sample sizes of 1.0 are those of its training; those of 1.5 are its largest, 2400 x 2400 pixels."""
    compression = Compression(config["temporal_compression_ratio"], 8, 8)
    height, width = (config["sample_height"] * 8, config["sample_width"] * 8)
    if config["patch_size_t"] is not None:
        height, width = 768, 1360
    return Video(
        frames=config["sample_frames"],
        height=height,
        width=width,
        text_tokens=config["max_text_seq_length"],
        compression=compression,
    )


ROWS = (
    ModelRow(
        "CogVideoXTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
)
