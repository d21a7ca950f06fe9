"""CogVideoX, 1.5 and ConsisID: one attention over video and text together, by processors that ignore the backend."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 8,
}


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 8),
        "timestep": torch.tensor([500, 300]),
    }


def _rotary_inputs() -> dict[str, Any]:
    angles = torch.arange(16.0).unsqueeze(1) / torch.tensor([1, 1, 10, 10, 100, 100, 1000, 1000])
    return _text_to_video_inputs() | {"image_rotary_emb": (angles.cos(), angles.sin())}


def _identity_inputs() -> dict[str, Any]:
    return _text_to_video_inputs() | {
        "id_cond": torch.randn(2, 6),
        "id_vit_hidden": [torch.randn(2, 3, 4)],
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    patch = config["patch_size"]
    frames, height, width = video.latents((1, patch, patch))
    frames += -frames % (config["patch_size_t"] or 1)  # 1.5 pads the latents to whole patches, and drops these frames
    inputs = {
        "hidden_states": video.features(frames, config["in_channels"], height, width),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "timestep": video.times(torch.int64),
        "return_dict": False,
    }
    if config["use_rotary_positional_embeddings"]:
        tokens = frames // (config["patch_size_t"] or 1) * (height // patch) * (width // patch)
        shape = (tokens, config["attention_head_dim"])
        inputs["image_rotary_emb"] = (torch.ones(shape), torch.zeros(shape))
    if video.text_tokens != config["max_text_seq_length"] and not config["use_rotary_positional_embeddings"]:
        raise FastacError(
            f"video: {video.text_tokens} tokens of text, but the positions of this model are those of "
            f"{config['max_text_seq_length']} tokens of text and the video. Use {config['max_text_seq_length']}."
        )
    if config["ofs_embed_dim"] is not None:
        inputs["ofs"] = torch.full((1,), 2.0, dtype=video.dtype)
    return inputs


def _default_video(config: Mapping[str, Any]) -> Video:
    """What 1.0 was trained for, by its sample sizes; those of 1.5 are the largest it takes, 2400 x 2400 pixels."""
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
        class_name="CogVideoXTransformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG,
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="CogVideoXTransformer3DModel",
        variant="1.5",
        containers=("transformer_blocks",),
        config=CONFIG | {"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True},
        inputs=_rotary_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="ConsisIDTransformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG
        | {
            "is_train_face": True,
            "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 6,
            "LFE_vit_dim": 4,
            "LFE_depth": 1,
            "LFE_dim_head": 4,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 1,
            "LFE_num_querie": 2,
            "LFE_output_dim": 10,
            "LFE_num_scale": 1,
        },
        inputs=_identity_inputs,
    ),
)
