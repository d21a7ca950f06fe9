"""LTX-Video, and LTX-2, whose blocks also attend from the video to the sound and back."""

from collections.abc import Mapping
from typing import Any

import torch

from fastac.models.reading import ModelRow
from fastac.models.videos import Compression, Video

FRAMES_PER_SECOND, FRAMES_PER_SECOND_OF_2 = 25, 24.0  # what the pipelines of LTX-Video and LTX-2 begin with


def _text_to_video_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[:, 12:] = False
    return {
        "hidden_states": torch.randn(2, 2 * 8 * 8, 4),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": mask,
        "num_frames": 2,
        "height": 8,
        "width": 8,
    }


def _audio_and_video_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 2 * 4 * 4, 4),
        "audio_hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "audio_encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
        "audio_encoder_attention_mask": torch.arange(16) < torch.tensor([[12], [8]]),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 9,
    }


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    frames, height, width = video.latents()
    scale = video.compression
    return {
        "hidden_states": video.features(frames * height * width, config["in_channels"]),
        "encoder_hidden_states": video.features(video.text_tokens, config["caption_channels"]),
        "timestep": video.times(torch.float32),
        "encoder_attention_mask": video.text_mask(torch.bool),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (scale.frames / FRAMES_PER_SECOND, scale.height, scale.width),
        "return_dict": False,
    }


def _default_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=161, height=512, width=704, text_tokens=128, compression=Compression(8, 32, 32))


def _inputs_of_audio_and_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    frames, height, width = video.latents()
    per_second = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    sound = round(video.frames / FRAMES_PER_SECOND_OF_2 * per_second)
    projects = config["use_prompt_embeddings"]  # LTX-2; the texts of LTX-2.3 come with the width of the attention
    text = config["caption_channels"] if projects else config["cross_attention_dim"]
    audio_text = config["caption_channels"] if projects else config["audio_cross_attention_dim"]
    return {
        "hidden_states": video.features(frames * height * width, config["in_channels"]),
        "audio_hidden_states": video.features(sound, config["audio_in_channels"]),
        "encoder_hidden_states": video.features(video.text_tokens, text),
        "audio_encoder_hidden_states": video.features(video.text_tokens, audio_text),
        "timestep": video.times(torch.float32),
        "sigma": video.times(torch.float32),
        "encoder_attention_mask": video.text_mask(torch.int64),
        "audio_encoder_attention_mask": video.text_mask(torch.int64),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": FRAMES_PER_SECOND_OF_2,
        "audio_num_frames": sound,
        "return_dict": False,
    }


def _default_audio_and_video(config: Mapping[str, Any]) -> Video:
    return Video(frames=121, height=512, width=768, text_tokens=1024, compression=Compression(8, 32, 32))


ROWS = (
    ModelRow(
        class_name="LTXVideoTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        inputs=_text_to_video_inputs,
        video_inputs=_inputs_of_video,
        default_video=_default_video,
    ),
    ModelRow(
        class_name="LTX2VideoTransformer3DModel",
        containers=("transformer_blocks",),
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8,
            "num_layers": 2,
            "caption_channels": 16,
        },
        inputs=_audio_and_video_inputs,
        video_inputs=_inputs_of_audio_and_video,
        default_video=_default_audio_and_video,
    ),
)
