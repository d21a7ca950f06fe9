"""Motif-Video: joint attention over video and text, then attention over the text alone; the last blocks decode."""

from fastac.models.row import ModelRow

ROWS = (
    ModelRow(
        class_name="MotifVideoTransformer3DModel",
        containers=("transformer_blocks", "single_transformer_blocks"),
    ),
)
