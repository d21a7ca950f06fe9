"""Image models whose refiners attend, too, and are not checkpointed; the blocks of others show in their structure."""

from fastac.models.row import ModelRow

ROWS = (
    ModelRow(
        class_name="HunyuanImageTransformer2DModel", containers=("transformer_blocks", "single_transformer_blocks")
    ),
    ModelRow(class_name="Krea2Transformer2DModel", containers=("transformer_blocks",)),
    ModelRow(class_name="Lumina2Transformer2DModel", containers=("layers",)),
)
