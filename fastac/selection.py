"""The blocks that a call of sparse attention was told to attend to, where they are an argument of the op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac import torch_internals
from fastac.errors import FastacError
from fastac.registry import ResolvedOp


class Selection:
    """What such arguments held in the forward."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = torch_internals.clones(tensors)
        self._origins = [None if tensor is None else StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def put_into(self, resolved: ResolvedOp, chosen: Sequence[torch.Tensor | None]) -> None:
        """Make the recomputed arguments of a call the forward's, which backward will read.

        Without a comparison, which would wait for the device. An argument that is still the very tensor of the forward
        was not chosen in the region: it is the caller's, and left alone.
        Raises FastacError when there are more or fewer blocks than in the forward.
        """
        for kept, mine, origin in zip(self.tensors, chosen, self._origins, strict=True):
            if mine is None or kept is None or origin is None or _is_storage_of(origin, mine):
                continue
            if kept.shape != mine.shape:
                raise FastacError(
                    f"recompute chose other blocks for {resolved.name} than the forward did: a table of "
                    f"{tuple(mine.shape)} where there was one of {tuple(kept.shape)}. What it chooses by must repeat "
                    f"itself exactly."
                )
            once = tuple([slice(0, 1) if step == 0 else slice(None) for step in mine.stride()])  # expanded: one memory
            mine[once].copy_(kept[once])


def _is_storage_of(origin: StorageWeakRef, tensor: torch.Tensor) -> bool:
    return not origin.expired() and origin.cdata == StorageWeakRef(tensor.untyped_storage()).cdata
