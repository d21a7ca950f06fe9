"""One file per DiT family: which modules hold its checkpointed blocks, and a tiny configuration to try it with."""

from fastac.models import (
    allegro,
    anyflow,
    cogvideox,
    cosmos,
    easyanimate,
    helios,
    hunyuan_video,
    kandinsky,
    latte,
    ltx,
    minimax_h3,
    mochi,
    motif_video,
    sana_video,
    wan,
    wan_animate,
)
from fastac.models.loops import LISTS
from fastac.models.reading import BlockContainer, ModelRow, containers, has_switch, is_available, tiny_model
from fastac.models.wrappers import refuse_other_checkpointing, unwrapped
from fastac.errors import class_name

_FAMILIES = (
    wan,
    wan_animate,
    anyflow,
    helios,
    ltx,
    hunyuan_video,
    cogvideox,
    mochi,
    allegro,
    latte,
    easyanimate,
    cosmos,
    sana_video,
    kandinsky,
    motif_video,
    minimax_h3,
)

MODELS: dict[str, ModelRow] = {row.name: row for family in _FAMILIES for row in family.ROWS}
"""Name -> row: `WanTransformer3DModel`, and `WanTransformer3DModel:i2v` for another way to use the class."""

_OF_CLASS = {row.class_name: row for row in reversed(MODELS.values())}


def row_of(model: object) -> ModelRow | None:
    """The catalogue row of a model, by exact class name: WanVACETransformer3DModel is no WanTransformer3DModel."""
    return _OF_CLASS.get(class_name(model))


__all__ = [
    "LISTS",
    "MODELS",
    "BlockContainer",
    "ModelRow",
    "containers",
    "has_switch",
    "is_available",
    "row_of",
    "tiny_model",
    "unwrapped",
]
