"""Motif-Video: joint attention over video and text, then attention over the text only; the last blocks decode."""

from fastac.models.row import ModelRow

ROWS = (ModelRow("MotifVideoTransformer3DModel", ("transformer_blocks", "single_transformer_blocks")),)
