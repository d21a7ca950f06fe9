"""HunyuanVideo, 1.5 and Framepack: joint attention over video and text; token refiners attend outside the blocks."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "rope_axes_dim": (2, 2, 4),
}
TWO_STREAMS = CONFIG | {"num_single_layers": 2, "pooled_projection_dim": 8}
DUAL_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")


def _padded(tokens: int, valid: int) -> torch.Tensor:
    return (torch.arange(tokens) < valid).expand(1, tokens)


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "encoder_attention_mask": _padded(12, 8),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.tensor([6000]),
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "encoder_attention_mask": _padded(6, 4),
        "encoder_hidden_states_2": torch.randn(1, 4, 10),
        "encoder_attention_mask_2": _padded(4, 3),
        "image_embeds": torch.randn(1, 3, 12),
    }


def _next_section_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "encoder_attention_mask": _padded(12, 8),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.tensor([6000]),
        "image_embeds": torch.randn(1, 4, 16),
        "indices_latents": torch.arange(11, 14),
        "latents_clean": torch.randn(1, 4, 1, 4, 4),
        "indices_latents_clean": torch.arange(1),
        "latents_history_2x": torch.randn(1, 4, 2, 4, 4),
        "indices_latents_history_2x": torch.arange(9, 11),
        "latents_history_4x": torch.randn(1, 4, 8, 4, 4),
        "indices_latents_history_4x": torch.arange(1, 9),
    }


VISION_TOKENS, GLYPH_TOKENS = 729, 256  # of SigLIP for the first frame, and of ByT5 for text within the picture


def _patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    return config["patch_size_t"], config["patch_size"], config["patch_size"]


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    return {
        "hidden_states": video.features(config["in_channels"], *video.latents(_patch(config))),
        "timestep": video.times(torch.float32),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "encoder_attention_mask": video.text_mask(video.dtype),
        "pooled_projections": video.features(config["pooled_projection_dim"]),
        "guidance": torch.full((video.batch,), 6000, dtype=video.dtype),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=129, height=720, width=1280, text_tokens=256, compression=Compression(4, 8, 8))


def _inputs_of_text_to_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Of HunyuanVideo 1.5. Its image is zeros, by which the model knows that there is none."""
    return {
        "hidden_states": video.features(config["in_channels"], *video.latents(_patch(config))),
        "timestep": video.times(video.dtype),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "encoder_attention_mask": video.text_mask(video.dtype),
        "encoder_hidden_states_2": video.features(GLYPH_TOKENS, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": video.text_mask(video.dtype, GLYPH_TOKENS),
        "image_embeds": torch.zeros(video.batch, VISION_TOKENS, config["image_embed_dim"], dtype=video.dtype),
        "return_dict": False,
    }


def _default_text_to_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=121, height=480, width=848, text_tokens=1000, compression=Compression(4, 16, 16))


ROWS = (
    ModelRow(
        class_name="HunyuanVideoTransformer3DModel",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS,
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="HunyuanVideoTransformer3DModel",
        variant="token_replace",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS | {"image_condition_type": "token_replace"},
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="HunyuanVideo15Transformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG | {"text_embed_2_dim": 10, "image_embed_dim": 12},
        inputs=_image_to_video_inputs,
        video_inputs=_inputs_of_text_to_video,
        default_video=_default_text_to_video,
    ),
    ModelRow(
        class_name="HunyuanVideoFramepackTransformer3DModel",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS | {"has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        inputs=_next_section_inputs,
    ),
)
