"""One file per DiT family: which modules hold its checkpointed blocks, and a tiny configuration to try it with."""

from fastac.models import ltx, wan
from fastac.models.reading import BlockContainer, ModelRow, containers, tiny_model

MODELS: dict[str, ModelRow] = {row.class_name: row for row in (*wan.ROWS, *ltx.ROWS)}
"""Exact class name in diffusers -> row. Never matched by prefix: WanVACETransformer3DModel is another model."""


def row_of(model: object) -> ModelRow | None:
    """The catalogue row of a model, by exact class name."""
    return MODELS.get(type(model).__name__)


__all__ = ["MODELS", "BlockContainer", "ModelRow", "containers", "row_of", "tiny_model"]
