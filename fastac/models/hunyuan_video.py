"""HunyuanVideo and 1.5: joint attention over video and text; token refiners attend outside the blocks."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video

# SigLIP makes the first for the first frame, ByT5 the second for text within the picture.
VISION_TOKENS, GLYPH_TOKENS = 729, 256


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    width = config["text_embed_dim"]
    return inputs_of_text_to_video(config, video, text_width=width, times=torch.float32, mask=video.dtype) | {
        "pooled_projections": video.features(config["pooled_projection_dim"]),
        # The default of the pipeline is 6.0, and it passes a thousand times that.
        "guidance": torch.full((video.batch,), 6000, dtype=video.dtype),
    }


def _inputs_of_text_to_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    """HunyuanVideo 1.5. An image of zeros means that there is none."""
    width = config["text_embed_dim"]
    return inputs_of_text_to_video(config, video, text_width=width, times=video.dtype, mask=video.dtype) | {
        "encoder_hidden_states_2": video.features(GLYPH_TOKENS, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": video.text_mask(video.dtype, GLYPH_TOKENS),
        # The model compares them with zero to tell that there is no image.
        "image_embeds": torch.zeros(video.batch, VISION_TOKENS, config["image_embed_dim"], dtype=video.dtype),
    }


ROWS = (
    ModelRow(
        "HunyuanVideoTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=129, height=720, width=1280, text_tokens=256, compression=Compression(4, 8, 8)),
    ),
    ModelRow(
        "HunyuanVideo15Transformer3DModel",
        video_inputs=_inputs_of_text_to_video,
        default_video=Video(frames=121, height=480, width=848, text_tokens=1000, compression=Compression(4, 16, 16)),
    ),
)
