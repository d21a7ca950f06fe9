"""Where a model's blocks are, and one file per DiT family that makes its inputs for a video."""

from fastac.models.blocks import block_lists, unwrapped
from fastac.models.catalogue import MODELS
from fastac.models.row import ModelRow

__all__ = ["MODELS", "ModelRow", "block_lists", "unwrapped"]
