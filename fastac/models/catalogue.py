"""The rows of all families, by the class of the model."""

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
from fastac.models.row import ModelRow

# Messages list the classes in this order.
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

# Rows of image models only name blocks. They have no video, so they are not in MODELS.
_ROWS = MODELS | {row.class_name: row for row in images.ROWS}


def row_of(model: object) -> ModelRow | None:
    """The catalogue row of a model, by its exact class name: WanVACETransformer3DModel has a row of its own."""
    # A subclass has no row, because its blocks and inputs may be others.
    return _ROWS.get(class_name(model))
