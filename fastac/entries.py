"""One attention call of a region: what is kept of it, and what its replay is checked by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastac.registry import ResolvedOp
from fastac.selection import Selection


class Entry:
    """One attention call of a region. `kept` is None where the policy recomputes it."""

    kept: Sequence[Any] | None = None
    single = False
    versions: Sequence[int | None] = ()
    guarded = False
    generator_states: Mapping[torch.device, torch.Tensor] = {}
    selection: Selection | None = None

    def __init__(self, resolved: ResolvedOp, keys: int, inputs: Sequence[Any]) -> None:
        self.resolved = resolved
        self.keys = keys
        self.inputs = inputs

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that the kept outputs hold."""
        chosen = self.selection.tensors if self.selection is not None else ()
        tensors = [value for value in (*(self.kept or ()), *chosen) if isinstance(value, torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class _Generation:
    """How many ops are intercepted so far."""

    current = 0


generation = _Generation()


def described(args: Sequence[Any]) -> list[Any]:
    """What of a call's first tensors must be alike in forward and recompute."""
    return [(a.shape, a.stride(), a.dtype) for a in args[:3] if isinstance(a, torch.Tensor)]


def readable(inputs: Sequence[Any]) -> str:
    """What `described` tells, for messages."""
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, _, dtype in inputs)
