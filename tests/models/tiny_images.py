"""Tiny image DiTs: those that have a row, and some that have none."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import Tiny

TOKENS, TEXT = 16, 6


def _ids(tokens: int, axes: int) -> torch.Tensor:
    return torch.stack(
        [torch.zeros(tokens), *(torch.arange(tokens) // 4 ** (axes - 1 - i) % 4 for i in range(1, axes))], -1
    )


def _tokens(**more: Any) -> dict[str, Any]:
    """What most models with packed image tokens take."""
    return {
        "hidden_states": torch.randn(1, TOKENS, 4),
        "encoder_hidden_states": torch.randn(1, TEXT, 12),
        "timestep": torch.tensor([0.5]),
        **more,
    }


def _image(**more: Any) -> dict[str, Any]:
    """What most models that take an image of latents take."""
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, TEXT, 12),
        "timestep": torch.tensor([500]),
        **more,
    }


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
IMAGES = {
    "FluxTransformer2DModel": Tiny(
        HEADS
        | {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (2, 2, 4),
            "pooled_projection_dim": 8,
        },
        lambda: _tokens(
            pooled_projections=torch.randn(1, 8),
            img_ids=_ids(TOKENS, 3).long(),
            txt_ids=torch.zeros(TEXT, 3, dtype=torch.long),
        ),
    ),
    "QwenImageTransformer2DModel": Tiny(
        HEADS
        | {
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (2, 2, 4),
        },
        lambda: _tokens(encoder_hidden_states_mask=(torch.arange(TEXT) < 4)[None], img_shapes=[[(1, 4, 4)]]),
    ),
    "Krea2Transformer2DModel": Tiny(
        {
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 16,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        lambda: _tokens(
            encoder_hidden_states=torch.randn(1, TEXT, 2, 16),
            position_ids=torch.cat([torch.zeros(TEXT, 3), _ids(TOKENS, 3)]),
        ),
    ),
    "SD3Transformer2DModel": Tiny(
        HEADS
        | {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
        },
        lambda: _image(pooled_projections=torch.randn(1, 8)),
    ),
    "HunyuanImageTransformer2DModel": Tiny(
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 12,
            "rope_axes_dim": (4, 4),
        },
        lambda: _image(timestep=torch.tensor([500.0]), encoder_attention_mask=(torch.arange(TEXT) < 4)[None]),
    ),
    "Lumina2Transformer2DModel": Tiny(
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (16, 16, 16),
            "cap_feat_dim": 12,
        },
        lambda: _image(timestep=torch.tensor([0.5]), encoder_attention_mask=torch.ones(1, TEXT, dtype=torch.bool)),
    ),
}
"""Class -> its tiny model."""
