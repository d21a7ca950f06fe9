"""Image models with refiners that attend but are not checkpointed. Other image models need no row."""

from fastac.models.row import ModelRow

# Without a row, the lists of the refiners would be taken for blocks: their members hold attention, too.
ROWS = (
    ModelRow("HunyuanImageTransformer2DModel", ("transformer_blocks", "single_transformer_blocks")),
    ModelRow("Krea2Transformer2DModel", ("transformer_blocks",)),
    ModelRow("Lumina2Transformer2DModel", ("layers",)),
)
