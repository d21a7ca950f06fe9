"""What sparse attention chose in one region: the outputs of its choices, and the arguments that hold chosen blocks.

A recompute may come out a little different and choose other blocks, which the saved outputs know nothing of. Choices
(topk, sort) stand on the tape in the order of their calls, as attention does. Only those among floating-point numbers
do: sorting whole numbers repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import torch_private
from fastac.errors import FastacError
from fastac.registry import BoundOp


def is_choice(args: Sequence[Any]) -> bool:
    """Whether a call chooses among floating-point numbers."""
    return bool(args[0].is_floating_point() and args[0].dim())


def packed(outputs: Sequence[torch.Tensor], among: int) -> tuple[torch.Tensor, ...]:
    """Copies of (values, indices), with indices as narrow as the number they choose among allows."""
    narrow = torch.int16 if among <= torch.iinfo(torch.int16).max else torch.int32
    if among > torch.iinfo(torch.int32).max:
        narrow = torch.int64
    return *torch_private.clones(outputs[:1]), outputs[1].to(narrow, copy=True)


def unpacked(kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(values, indices) as the op returned them, in memory of their own."""
    return *torch_private.clones(kept[:1]), kept[1].to(torch.int64, copy=True)


class Selection:
    """What the arguments of a sparse attention held in the forward, by which it was given the chosen blocks."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = torch_private.clones(tensors)
        self._origins = [None if tensor is None else StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def put_into(self, op: BoundOp, chosen: Sequence[torch.Tensor | None]) -> None:
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
                    f"recompute chose other blocks for {op.name} than the forward did: a table of {tuple(mine.shape)} "
                    f"where there was one of {tuple(kept.shape)}. What it chooses by must repeat itself exactly."
                )
            once = tuple([slice(0, 1) if step == 0 else slice(None) for step in mine.stride()])  # expanded: one memory
            mine[once].copy_(kept[once])


def _is_storage_of(origin: StorageWeakRef, tensor: torch.Tensor) -> bool:
    return not origin.expired() and origin.cdata == StorageWeakRef(tensor.untyped_storage()).cdata
