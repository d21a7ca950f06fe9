"""Cosmos 1 to 2.5, and Cosmos 3, which hands the bound `__call__` of its layers to checkpointing."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "concat_padding_mask": False,  # it is resized by torchvision, which need not be there
}
TEXT, VIDEO, SOUND, ACTION = 4, 16, 2, 2


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "attention_mask": (torch.arange(12) < 8).unsqueeze(0),
        "fps": 30,
    }


def _image_context_inputs() -> dict[str, Any]:
    return _text_to_video_inputs() | {
        "timestep": torch.full((1, 1, 2, 1, 1), 500),
        "encoder_hidden_states": (torch.randn(1, 12, 20), torch.randn(1, 4, 10)),
        "attention_mask": None,
    }


def _omni_inputs() -> dict[str, Any]:
    text, video, sound, action = torch.arange(TEXT + VIDEO + SOUND + ACTION).split([TEXT, VIDEO, SOUND, ACTION])
    return {
        "input_ids": torch.arange(TEXT),
        "text_indexes": text,
        "position_ids": torch.arange(TEXT + VIDEO + SOUND + ACTION).expand(3, -1),
        "und_len": TEXT,
        "sequence_length": TEXT + VIDEO + SOUND + ACTION,
        "vision_tokens": [torch.randn(1, 2, 1, 4, 4)],
        "vision_token_shapes": [(1, 4, 4)],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((VIDEO,), 500),
        "vision_noisy_frame_indexes": [torch.arange(1)],
        "sound_tokens": [torch.randn(3, SOUND)],
        "sound_token_shapes": [(SOUND, 1, 1)],
        "sound_sequence_indexes": sound,
        "sound_mse_loss_indexes": sound,
        "sound_timesteps": torch.full((SOUND,), 500),
        "sound_noisy_frame_indexes": [torch.arange(SOUND)],
        "action_tokens": [torch.randn(ACTION, 3)],
        "action_token_shapes": [(ACTION, 1, 1)],
        "action_sequence_indexes": action,
        "action_mse_loss_indexes": action,
        "action_timesteps": torch.full((ACTION,), 500),
        "action_noisy_frame_indexes": [torch.arange(ACTION)],
        "action_domain_ids": [torch.tensor(1)],
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Of Cosmos 1: Cosmos 2 and 2.5 have another VAE, and other inputs."""
    if config["extra_pos_embed_type"] is None:
        raise FastacError("video: of this class, Cosmos 1 alone is known here, which has an extra_pos_embed_type.")
    inputs = {
        "hidden_states": video.features(config["in_channels"], *video.latents(tuple(config["patch_size"]))),
        "timestep": video.times(video.dtype),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_embed_dim"]),
        "fps": 30,
        "return_dict": False,
    }
    if config["concat_padding_mask"]:
        inputs["padding_mask"] = torch.zeros(1, 1, video.height, video.width, dtype=video.dtype)
    return inputs


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=121, height=704, width=1280, text_tokens=512, compression=Compression(8, 8, 8))


ROWS = (
    ModelRow(
        class_name="CosmosTransformer3DModel",
        containers=("transformer_blocks",),
        config=CONFIG,
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="CosmosTransformer3DModel",
        variant="2.5",
        containers=("transformer_blocks",),
        config=CONFIG
        | {
            "extra_pos_embed_type": None,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 20,
            "encoder_hidden_states_channels": 16,
            "img_context_dim_in": 10,
            "img_context_dim_out": 24,
        },
        inputs=_image_context_inputs,
    ),
    ModelRow(
        class_name="Cosmos3OmniTransformer",
        containers=("layers",),
        config={
            "head_dim": 6,
            "hidden_size": 12,
            "intermediate_size": 24,
            "latent_channel": 2,
            "latent_patch_size": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "patch_latent_dim": 2,
            "action_dim": 3,
            "action_gen": True,
            "num_embodiment_domains": 2,
            "sound_dim": 3,
            "sound_gen": True,
            "vocab_size": TEXT,
            "rope_axes_dim": (1, 1, 1),
        },
        inputs=_omni_inputs,
    ),
)
