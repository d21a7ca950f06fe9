"""LTX-Video, and LTX-2, whose blocks also attend between video and sound."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video

# These are the defaults of the pipelines of LTX-Video and LTX-2.
FRAMES_PER_SECOND, FRAMES_PER_SECOND_OF_2 = 25, 24.0


def _inputs_of_latents(config: Mapping[str, Any], video: Video, text_width: int, mask: torch.dtype) -> dict[str, Any]:
    """Latents come as tokens, with the sizes of their grid."""
    frames, height, width = video.latents()
    return {
        "hidden_states": video.features(frames * height * width, config["in_channels"]),
        "encoder_hidden_states": video.features(video.text_tokens, text_width),
        "timestep": video.times(torch.float32),
        "encoder_attention_mask": video.text_mask(mask),
        "num_frames": frames,
        "height": height,
        "width": width,
        "return_dict": False,
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    scale = video.compression
    # Positions are in seconds and pixels, as in the pipeline.
    rope_scale = (scale.frames / FRAMES_PER_SECOND, scale.height, scale.width)
    inputs = _inputs_of_latents(config, video, config["caption_channels"], torch.bool)
    return inputs | {"rope_interpolation_scale": rope_scale}


def _inputs_of_audio_and_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    per_second = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    sound = round(video.frames / FRAMES_PER_SECOND_OF_2 * per_second)
    # LTX-2 projects its texts. Those of LTX-2.3 come with the width of the attention.
    projects = config["use_prompt_embeddings"]
    text = config["caption_channels"] if projects else config["cross_attention_dim"]
    audio_text = config["caption_channels"] if projects else config["audio_cross_attention_dim"]
    return _inputs_of_latents(config, video, text, torch.int64) | {
        "audio_hidden_states": video.features(sound, config["audio_in_channels"]),
        "audio_encoder_hidden_states": video.features(video.text_tokens, audio_text),
        "sigma": video.times(torch.float32),
        "audio_encoder_attention_mask": video.text_mask(torch.int64),
        "fps": FRAMES_PER_SECOND_OF_2,
        "audio_num_frames": sound,
    }


ROWS = (
    ModelRow(
        "LTXVideoTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=161, height=512, width=704, text_tokens=128, compression=Compression(8, 32, 32)),
    ),
    ModelRow(
        "LTX2VideoTransformer3DModel",
        video_inputs=_inputs_of_audio_and_video,
        default_video=Video(frames=121, height=512, width=768, text_tokens=1024, compression=Compression(8, 32, 32)),
    ),
)
