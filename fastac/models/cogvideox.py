"""CogVideoX, 1.5 and ConsisID: one attention over video and text together, by processors that ignore the backend."""

from typing import Any

import torch

from fastac.models.reading import ModelRow

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


ROWS = (
    ModelRow(
        class_name="CogVideoXTransformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG,
        inputs=_text_to_video_inputs,
    ),
    ModelRow(
        class_name="CogVideoXTransformer3DModel",
        variant="1.5",
        containers=("transformer_blocks",),
        config=CONFIG | {"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True},
        inputs=_rotary_inputs,
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
