"""One file per DiT family: which modules hold its checkpointed blocks, and how to make its inputs for a video."""

from fastac.errors import class_name
from fastac.models import (
    allegro,
    cogvideox,
    cosmos,
    easyanimate,
    hunyuan_video,
    images,
    kandinsky,
    latte,
    ltx,
    minimax_h3,
    mochi,
    motif_video,
    sana_video,
    wan,
)
from fastac.models.blocks import (
    LISTS,
    BlockContainer,
    containers,
    grouped,
    is_by_forward,
    module_lists,
    name_blocks,
    possible_containers,
    select,
    set_switch,
    switch_function,
    switch_of,
    switches,
    transformers_switches,
    unwrapped,
    without_wrappers,
)
from fastac.models.row import ModelRow

_FAMILIES = (
    wan,
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

MODELS: dict[str, ModelRow] = {row.class_name: row for family in _FAMILIES for row in family.ROWS}
"""Class name -> row, for the video models."""

_ROWS = MODELS | {row.class_name: row for row in images.ROWS}


def row_of(model: object) -> ModelRow | None:
    """The catalogue row of a model, by its exact class name: WanVACETransformer3DModel has a row of its own."""
    return _ROWS.get(class_name(model))


__all__ = [
    "LISTS",
    "MODELS",
    "BlockContainer",
    "ModelRow",
    "containers",
    "grouped",
    "is_by_forward",
    "module_lists",
    "name_blocks",
    "possible_containers",
    "row_of",
    "select",
    "set_switch",
    "switch_function",
    "switch_of",
    "switches",
    "transformers_switches",
    "unwrapped",
    "without_wrappers",
]
