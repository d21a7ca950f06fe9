"""Where a model's blocks are, and one file per DiT family, whose rows make its inputs for a video."""

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
from fastac.models.blocks import block_lists as block_lists
from fastac.models.blocks import unwrapped as unwrapped
from fastac.models.row import ModelRow

# Messages list the classes in this order.
_FAMILIES = (wan, ltx, hunyuan_video, cogvideox, mochi, allegro, latte, easyanimate, cosmos, sana_video, kandinsky)

MODELS: dict[str, ModelRow] = {row.class_name: row for family in _FAMILIES for row in family.ROWS}
"""Class name -> row. Names are exact: WanVACETransformer3DModel has a row of its own."""
