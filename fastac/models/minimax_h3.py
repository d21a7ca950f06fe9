"""MiniMax-H3: one attention over text, sound and video, in one sequence; its text refiner is checkpointed, too."""

from fastac.models.row import ModelRow

ROWS = (
    ModelRow(
        class_name="MiniMaxH3Transformer3DModel",
        containers=("token_refiner.refiner_blocks", "transformer_blocks"),
    ),
)
