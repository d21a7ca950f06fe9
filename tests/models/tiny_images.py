"""Tiny image DiTs."""

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


def _positions(axes: int = 3) -> dict[str, Any]:
    return {"img_ids": _ids(TOKENS, axes).long(), "txt_ids": torch.zeros(TEXT, axes, dtype=torch.long)}


def _image(**more: Any) -> dict[str, Any]:
    """What most models that take an image of latents take."""
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, TEXT, 12),
        "timestep": torch.tensor([500]),
        **more,
    }


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
FLUX = HEADS | {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (2, 2, 4),
}

IMAGES = {
    "FluxTransformer2DModel": Tiny(
        FLUX | {"pooled_projection_dim": 8}, lambda: _tokens(pooled_projections=torch.randn(1, 8), **_positions())
    ),
    "Flux2Transformer2DModel": Tiny(
        FLUX | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16},
        lambda: _tokens(guidance=torch.tensor([4.0]), **_positions(4)),
    ),
    "Flux3Transformer2DModel": Tiny(
        FLUX | {"axes_dims_rope": (2, 2, 2, 2), "cond_in_channels": 4, "timestep_channels": 16},
        lambda: _tokens(
            image_cond_hidden_states=torch.randn(1, TOKENS, 4),
            image_cond_ids=_ids(TOKENS, 4).long(),
            **_positions(4),
        ),
    ),
    "ChromaTransformer2DModel": Tiny(
        FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        lambda: _tokens(**_positions()),
    ),
    "LongCatImageTransformer2DModel": Tiny(FLUX | {"axes_dims_rope": [2, 2, 4]}, lambda: _tokens(**_positions())),
    "BriaFiboTransformer2DModel": Tiny(
        FLUX | {"axes_dims_rope": [2, 2, 4], "text_encoder_dim": 12},
        lambda: _tokens(text_encoder_layers=[torch.randn(1, TEXT, 12) for _ in range(3)], **_positions()),
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
    "AuraFlowTransformer2DModel": Tiny(
        HEADS
        | {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        _image,
    ),
    "PixArtTransformer2DModel": Tiny(
        HEADS | {"num_layers": 2, "cross_attention_dim": 16, "sample_size": 8, "caption_channels": 12},
        lambda: _image(added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "SanaTransformer2DModel": Tiny(
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 12,
            "sample_size": 8,
        },
        _image,
    ),
    "CogView4Transformer2DModel": Tiny(
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 12,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "sample_size": 8,
            "rope_axes_dim": (16, 16),
        },
        lambda: _image(
            original_size=torch.tensor([[64, 64]]),
            target_size=torch.tensor([[64, 64]]),
            crop_coords=torch.tensor([[0, 0]]),
        ),
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
    "ZImageTransformer2DModel": Tiny(
        {
            "in_channels": 4,
            "dim": 24,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 12,
            "axes_dims": [4, 4, 4],
            "axes_lens": [64, 16, 16],
        },
        lambda: {
            "x": [torch.randn(4, 1, 8, 8)],
            "t": torch.tensor([1]),
            "cap_feats": [torch.randn(TEXT, 12)],
        },
    ),
    "HiDreamImageTransformer2DModel": Tiny(
        HEADS
        | {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "caption_channels": (12, 10),
            "text_emb_dim": 8,
            "num_activated_experts": 1,
            "num_routed_experts": 2,
            "axes_dims_rope": (2, 2, 4),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "timesteps": torch.tensor([500]),
            "encoder_hidden_states_t5": torch.randn(1, TEXT, 12),
            "encoder_hidden_states_llama3": torch.randn(2, 1, TEXT, 10),
            "pooled_embeds": torch.randn(1, 8),
        },
    ),
    "OmniGenTransformer2DModel": Tiny(
        {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 16,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 64,
            "pos_embed_max_size": 8,
            "time_step_dim": 16,
            "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "timestep": torch.tensor([500]),
            "input_ids": torch.arange(TEXT)[None],
            "input_img_latents": [torch.randn(1, 4, 4, 4)],
            "input_image_sizes": {0: [[1, 5]]},
            "attention_mask": torch.ones(1, TEXT + 1 + TOKENS, TEXT + 1 + TOKENS, dtype=torch.long),
            "position_ids": torch.arange(TEXT + 1 + TOKENS)[None],
        },
    ),
    "PRXTransformer2DModel": Tiny(
        {
            "in_channels": 4,
            "context_in_dim": 12,
            "hidden_size": 16,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [4, 4],
        },
        lambda: _image(timestep=torch.tensor([0.5])),
    ),
}
"""Class -> its tiny model."""
