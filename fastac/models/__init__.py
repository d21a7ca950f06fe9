"""One file per DiT family: which modules hold its checkpointed blocks, and a tiny configuration to try it with."""

from fastac.models import cogvideox, hunyuan_video, ltx, wan
from fastac.models.reading import BlockContainer, ModelRow, containers, tiny_model
from fastac.models.wrappers import unwrapped

_FAMILIES = (wan, ltx, hunyuan_video, cogvideox)

MODELS: dict[str, ModelRow] = {row.name: row for family in _FAMILIES for row in family.ROWS}
"""Name -> row: `WanTransformer3DModel`, and `WanTransformer3DModel:i2v` for another way to use the class."""

_OF_CLASS = {row.class_name: row for row in reversed(MODELS.values())}


def row_of(model: object) -> ModelRow | None:
    """The catalogue row of a model, by exact class name: WanVACETransformer3DModel is no WanTransformer3DModel."""
    return _OF_CLASS.get(type(model).__name__)


__all__ = ["MODELS", "BlockContainer", "ModelRow", "containers", "row_of", "tiny_model", "unwrapped"]
