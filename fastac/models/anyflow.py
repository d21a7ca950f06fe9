"""AnyFlow, and AnyFlow-FAR, whose blocks attend to earlier chunks of the video by flex_attention alone."""

from typing import Any

import torch

from fastac.models import wan
from fastac.models.reading import ModelRow


def _flow_map_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 2, 4, 8, 8),
        "timestep": torch.full((1, 2), 500.0),
        "r_timestep": torch.full((1, 2), 250.0),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def _autoregressive_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 3, 4, 8, 8),
        "timestep": torch.full((1, 3), 500.0),
        "r_timestep": torch.full((1, 3), 250.0),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "chunk_partition": [1, 1, 1],
        "clean_hidden_states": torch.randn(1, 2, 4, 8, 8),
        "clean_timestep": torch.zeros(1, 2),
    }


ROWS = (
    ModelRow(
        class_name="AnyFlowTransformer3DModel",
        containers=("blocks",),
        config=wan.CONFIG,
        inputs=_flow_map_inputs,
    ),
    ModelRow(
        class_name="AnyFlowFARTransformer3DModel",
        containers=("blocks",),
        config=wan.CONFIG | {"full_chunk_limit": 2},
        inputs=_autoregressive_inputs,
        flex=True,
    ),
)
