"""Wan 2.1 and 2.2 and what is built like it: attention over the video, then over text and image, in every block."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
IMAGE = {"image_dim": 16, "added_kv_proj_dim": 24}
TEXT_TOKENS = 512  # the attention takes what is before the last 512 tokens for the image


def _text_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def _short_video_inputs() -> dict[str, Any]:
    return _text_to_video_inputs() | {"hidden_states": torch.randn(1, 4, 2, 8, 8)}


def _image_to_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 16),
        "encoder_hidden_states_image": torch.randn(1, 5, 16),
    }


def _control_inputs() -> dict[str, Any]:
    return _short_video_inputs() | {"control_hidden_states": torch.randn(1, 12, 2, 8, 8)}


def _diffusion_forcing_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 4, 8, 8),
        "timestep": torch.tensor([[500, 500, 300, 300]]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "enable_diffusion_forcing": True,
        "fps": [1],
    }


LATENTS_OF_5B = 48
"""Channels of the VAE of Wan 2.2 TI2V 5B alone, which compresses more; its pipeline gives each token a timestep."""
IMAGE_TOKENS = 257  # of CLIP ViT-H/14 at 224 x 224, and one for the class


def inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """For text to video, and image to video where the configuration has an encoder of images."""
    patch = tuple(config["patch_size"])
    inputs = {
        "hidden_states": video.features(config["in_channels"], *video.latents(patch)),
        "timestep": video.times(torch.int64),
        "encoder_hidden_states": video.features(video.text_tokens, config["text_dim"]),
        "return_dict": False,
    }
    if config["in_channels"] == LATENTS_OF_5B:
        inputs["timestep"] = torch.full((video.batch, video.tokens(patch)), 500.0)
    if config["image_dim"] is not None:
        if video.text_tokens != TEXT_TOKENS:
            raise FastacError(
                f"video: {video.text_tokens} tokens of text, but with images the attention takes what is before the "
                f"last {TEXT_TOKENS} for the image. Use {TEXT_TOKENS}."
            )
        images = 1 if config["pos_embed_seq_len"] is None else 2  # the first frame, or the first and the last
        tokens = torch.randn(images * video.batch, IMAGE_TOKENS, config["image_dim"], dtype=video.dtype)
        inputs["encoder_hidden_states_image"] = tokens
    return inputs


def default_video(config: Mapping[str, Any]) -> Video:
    """480p of Wan 2.1, or 720p where the VAE is that of the 5B model."""
    if config["in_channels"] == LATENTS_OF_5B:
        return Video(frames=121, height=704, width=1280, text_tokens=TEXT_TOKENS, compression=Compression(4, 16, 16))
    return Video(frames=81, height=480, width=832, text_tokens=TEXT_TOKENS, compression=Compression(4, 8, 8))


def _inputs_of_controlled_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    inputs = inputs_of_video(config, video)
    control = video.features(config["vace_in_channels"], *inputs["hidden_states"].shape[2:])
    return inputs | {"control_hidden_states": control}


def _inputs_of_skyreels_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    if config["inject_sample_info"]:
        raise FastacError("video: SkyReels-V2 for diffusion forcing (inject_sample_info) is not known here.")
    return inputs_of_video(config, video)


def _default_skyreels_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=97, height=544, width=960, text_tokens=TEXT_TOKENS, compression=Compression(4, 8, 8))


ROWS = (
    ModelRow(
        class_name="WanTransformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_text_to_video_inputs,
        video_inputs=inputs_of_video,
        default_video=default_video,
    ),
    ModelRow(
        class_name="WanTransformer3DModel",
        variant="i2v",
        containers=("blocks",),
        config=CONFIG | IMAGE,
        inputs=_image_to_video_inputs,
        video_inputs=inputs_of_video,
        default_video=default_video,
    ),
    ModelRow(
        class_name="WanVACETransformer3DModel",
        containers=("blocks", "vace_blocks"),
        config=CONFIG | {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 12},
        inputs=_control_inputs,
        video_inputs=_inputs_of_controlled_video,
        default_video=default_video,
    ),
    ModelRow(
        class_name="ChronoEditTransformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_short_video_inputs,
        video_inputs=inputs_of_video,
        default_video=default_video,
    ),
    ModelRow(
        class_name="SkyReelsV2Transformer3DModel",
        containers=("blocks",),
        config=CONFIG,
        inputs=_short_video_inputs,
        video_inputs=_inputs_of_skyreels_video,
        default_video=_default_skyreels_video,
    ),
    ModelRow(
        class_name="SkyReelsV2Transformer3DModel",
        variant="diffusion_forcing",
        containers=("blocks",),
        config=CONFIG | {"num_frame_per_block": 2, "inject_sample_info": True},
        inputs=_diffusion_forcing_inputs,
    ),
)
