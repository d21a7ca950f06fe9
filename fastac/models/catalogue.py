"""The rows of all families, by the class of the model."""

from fastac.models import (
    allegro,
    cogvideox,
    cosmos,
    easyanimate,
    hunyuan_video,
    kandinsky,
    latte,
    ltx,
    mochi,
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
)

MODELS: dict[str, ModelRow] = {row.class_name: row for family in _FAMILIES for row in family.ROWS}
"""Class name -> row. WanVACETransformer3DModel has a row of its own: a subclass may take other inputs."""
