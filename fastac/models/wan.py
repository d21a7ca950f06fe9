"""Wan 2.1, 2.2 and their relatives: each block attends to the video, then to text and image."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video, patch_of

TEXT_TOKENS = 512
"""The attention takes the last 512 tokens for the text, and all before them for the image."""
LATENTS_OF_5B = 48
"""VAE channels of Wan 2.2 TI2V 5B only. Its VAE compresses more, and its pipeline gives each token a timestep."""
IMAGE_TOKENS = 257  # CLIP ViT-H/14 at 224 x 224, and one for the class


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """Text to video; image to video if the configuration has an image encoder."""
    inputs = inputs_of_text_to_video(config, video, text_width=config["text_dim"], times=torch.int64)
    if config["in_channels"] == LATENTS_OF_5B:
        inputs["timestep"] = torch.full((video.batch, video.tokens(patch_of(config))), 500.0)
    if config["image_dim"] is not None:
        if video.text_tokens != TEXT_TOKENS:
            raise FastacError(
                f"video: {video.text_tokens} tokens of text, but with images the attention takes all tokens before the "
                f"last {TEXT_TOKENS} for the image. Use {TEXT_TOKENS}."
            )
        images = 1 if config["pos_embed_seq_len"] is None else 2  # the first frame, or the first and the last
        tokens = torch.randn(images * video.batch, IMAGE_TOKENS, config["image_dim"], dtype=video.dtype)
        inputs["encoder_hidden_states_image"] = tokens
    return inputs


def _default_video(config: Mapping[str, Any]) -> Video:
    """480p, or 720p with the VAE of the 5B model."""
    if config["in_channels"] == LATENTS_OF_5B:
        return Video(frames=121, height=704, width=1280, text_tokens=TEXT_TOKENS, compression=Compression(4, 16, 16))
    return Video(frames=81, height=480, width=832, text_tokens=TEXT_TOKENS, compression=Compression(4, 8, 8))


def _inputs_of_controlled_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    inputs = _inputs_of_video(config, video)
    control = video.features(config["vace_in_channels"], *inputs["hidden_states"].shape[2:])
    return inputs | {"control_hidden_states": control}


ROWS = (
    ModelRow("WanTransformer3DModel", video_inputs=_inputs_of_video, default_video=_default_video),
    ModelRow(
        "WanVACETransformer3DModel",
        video_inputs=_inputs_of_controlled_video,
        default_video=_default_video,
    ),
    ModelRow("ChronoEditTransformer3DModel", video_inputs=_inputs_of_video, default_video=_default_video),
    ModelRow(
        "SkyReelsV2Transformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(
            frames=97, height=544, width=960, text_tokens=TEXT_TOKENS, compression=Compression(4, 8, 8)
        ),
    ),
)
