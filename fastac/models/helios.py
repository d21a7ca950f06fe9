"""Helios: attention over the new frames and a compressed history, then over the text, in every block."""

from typing import Any

import torch

from fastac.models import wan
from fastac.models.reading import ModelRow

CONFIG = {name: value for name, value in wan.CONFIG.items() if name != "rope_max_seq_len"}


def _next_section_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "indices_hidden_states": torch.arange(7, 9).unsqueeze(0),
        "indices_latents_history_short": torch.arange(6, 7).unsqueeze(0),
        "indices_latents_history_mid": torch.arange(4, 6).unsqueeze(0),
        "indices_latents_history_long": torch.arange(4).unsqueeze(0),
        "latents_history_short": torch.randn(1, 4, 1, 8, 8),
        "latents_history_mid": torch.randn(1, 4, 2, 8, 8),
        "latents_history_long": torch.randn(1, 4, 4, 8, 8),
    }


ROWS = (
    ModelRow(
        class_name="HeliosTransformer3DModel",
        containers=("blocks",),
        config=CONFIG | {"rope_dim": (4, 4, 4)},
        inputs=_next_section_inputs,
    ),
)
