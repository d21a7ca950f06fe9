"""HunyuanVideo, 1.5 and Framepack: joint attention over video and text; token refiners attend outside the blocks."""

from typing import Any

import torch

from fastac.models.reading import ModelRow

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


ROWS = (
    ModelRow(
        class_name="HunyuanVideoTransformer3DModel",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS,
        inputs=_text_to_video_inputs,
    ),
    ModelRow(
        class_name="HunyuanVideoTransformer3DModel",
        variant="token_replace",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS | {"image_condition_type": "token_replace"},
        inputs=_text_to_video_inputs,
    ),
    ModelRow(
        class_name="HunyuanVideo15Transformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG | {"text_embed_2_dim": 10, "image_embed_dim": 12},
        inputs=_image_to_video_inputs,
    ),
    ModelRow(
        class_name="HunyuanVideoFramepackTransformer3DModel",
        containers=DUAL_AND_SINGLE,
        config=TWO_STREAMS | {"has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        inputs=_next_section_inputs,
    ),
)
