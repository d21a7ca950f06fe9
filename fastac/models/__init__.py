"""One file per DiT family: which modules hold its checkpointed blocks, and how to make its inputs for a video."""

from fastac.models.blocks import BlockContainer, containers, unwrapped
from fastac.models.catalogue import MODELS, row_of
from fastac.models.row import ModelRow

__all__ = ["MODELS", "BlockContainer", "ModelRow", "containers", "row_of", "unwrapped"]
