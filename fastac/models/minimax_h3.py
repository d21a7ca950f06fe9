"""MiniMax-H3: one attention over text, sound and video, in one sequence. Its text refiner is checkpointed too."""

from fastac.models.row import ModelRow

ROWS = (ModelRow("MiniMaxH3Transformer3DModel", ("token_refiner.refiner_blocks", "transformer_blocks")),)
