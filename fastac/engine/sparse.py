"""Blocks that sparse attention chose in one region: outputs of choices, and arguments that hold them.

A recompute may differ in the last bits, and choose other blocks than the saved outputs belong to. So choices (topk,
sort) are saved too, in the order of their calls. Choices among integers are not saved: sorting them again gives the
same result.
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
    """Copies of (values, indices). The indices have the narrowest dtype that holds indices below `among`."""
    dtypes = (torch.int16, torch.int32, torch.int64)
    narrow = next(dtype for dtype in dtypes if among <= torch.iinfo(dtype).max)
    return *torch_private.clones(outputs[:1]), outputs[1].to(narrow, copy=True)


def unpacked(stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(values, indices) as the op returned them, in memory of their own."""
    return *torch_private.clones(stored[:1]), stored[1].to(torch.int64, copy=True)


class Selection:
    """The arguments of a sparse attention that held the chosen blocks in the forward."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = torch_private.clones(tensors)
        self._origins = [None if tensor is None else StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def put_into(self, op: BoundOp, chosen: Sequence[torch.Tensor | None]) -> None:
        """Overwrite the arguments of a recomputed call, which backward will read, with those of the forward.

        They are not compared: that would wait for the device. If an argument is the very tensor of the forward, it was
        not chosen in the region. It belongs to the caller, and is left as it is.
        Raises FastacError if there are more or fewer blocks than in the forward.
        """
        for stored, recomputed, origin in zip(self.tensors, chosen, self._origins, strict=True):
            if recomputed is None or stored is None or origin is None:
                continue
            if not origin.expired() and origin.cdata == torch_private.memory(recomputed):
                continue
            if stored.shape != recomputed.shape:
                raise FastacError(
                    f"recompute chose other blocks for {op.name} than the forward did: a table of "
                    f"{tuple(recomputed.shape)}, and the forward had {tuple(stored.shape)}. What it chooses by must "
                    f"repeat itself exactly."
                )
            # An expanded dimension has the same memory for every index, and torch refuses to write it as a whole.
            once = tuple([slice(0, 1) if step == 0 else slice(None) for step in recomputed.stride()])
            recomputed[once].copy_(stored[once])
