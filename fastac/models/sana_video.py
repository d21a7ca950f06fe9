"""Sana-Video and Sana-WM: linear attention over the video, which has no kernel, and softmax attention to the text."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": (torch.arange(12) < 8).unsqueeze(0),
    }


def _camera_inputs() -> dict[str, Any]:
    frames = 2
    pose = torch.eye(4).flatten().expand(1, frames, 16) + 0.1 * torch.randn(1, frames, 16)
    intrinsics = torch.tensor([4.0, 4.0, 2.0, 2.0]).expand(1, frames, 4)
    return {
        "hidden_states": torch.randn(1, 4, frames, 4, 4),
        "timestep": torch.full((1, 1, frames), 500),
        "encoder_hidden_states": torch.randn(1, 1, 12, 16),
        "encoder_attention_mask": (torch.arange(12) < 8).unsqueeze(0),
        "camera_conditions": torch.cat([pose, intrinsics], dim=-1),
        "chunk_plucker": torch.randn(1, 6, frames, 4, 4),
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    return {
        "hidden_states": video.features(config["in_channels"], *video.latents(tuple(config["patch_size"]))),
        "encoder_hidden_states": video.features(video.text_tokens, config["caption_channels"]),
        "encoder_attention_mask": video.text_mask(torch.int64),
        "timestep": video.times(torch.int64),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=81, height=480, width=832, text_tokens=300, compression=Compression(4, 8, 8))


ROWS = (
    ModelRow(
        class_name="SanaVideoTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 16,
            "sample_size": 8,
            "rope_max_seq_len": 32,
        },
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="SanaWMTransformer3DModel",
        containers=("blocks",),
        config={
            "in_channels": 4,
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "chunk_plucker_channels": 6,
            "caption_channels": 16,
        },
        inputs=_camera_inputs,
        linear=("BidirectionalGDNUCPESinglePathLiteLA",),
    ),
)
