"""MiniMax-H3: one attention over text, sound and video, in one sequence; its text refiner is checkpointed, too."""

from typing import Any

import torch

from fastac.models.reading import ModelRow

TEXT, AUDIO, VIDEO = 4, 6, 16


def _audio_and_video_inputs() -> dict[str, Any]:
    rows = torch.arange(TEXT + AUDIO + VIDEO)
    text, audio, video = rows.split([TEXT, AUDIO, VIDEO])
    return {
        "hidden_states": torch.randn(2, VIDEO, 16),
        "audio_hidden_states": torch.randn(2, AUDIO, 6),
        "encoder_hidden_states": torch.randn(2, TEXT, 8),
        "timestep": torch.tensor([0.75, 0.25]),
        "timestep_indices": ((rows >= TEXT) & (rows < TEXT + AUDIO)).long(),
        "token_tags": torch.tensor([1] * TEXT + [2] * AUDIO + [0] * VIDEO),
        "position_ids": torch.stack([rows, rows % 4, rows % 2], dim=-1),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


ROWS = (
    ModelRow(
        class_name="MiniMaxH3Transformer3DModel",
        containers=("token_refiner.refiner_blocks", "transformer_blocks"),
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 6,
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        inputs=_audio_and_video_inputs,
    ),
)
