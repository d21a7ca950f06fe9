"""What a tape holds: one entry per attention call of a region, with what its replay is checked by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.registry import ResolvedOp


class Entry:
    """One attention call of a region. `kept` is None where the policy recomputes it."""

    kept: Sequence[Any] | None = None
    single = False
    versions: Sequence[int | None] = ()
    guarded = False
    generator_state: torch.Tensor | None = None
    device: torch.device | None = None
    selection: Sequence[Any] = ()

    def __init__(self, resolved: ResolvedOp, keys: int, inputs: Sequence[Any]) -> None:
        self.resolved = resolved
        self.keys = keys
        self.inputs = inputs

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that the kept outputs hold."""
        tensors = [value for value in (*(self.kept or ()), *self.selection) if isinstance(value, torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Tape(list[Entry | None]):
    """The entries of one region. Ops that are intercepted later than `generation` are none of its business.

    Without that, a row registered between a forward and its recompute would ask the tape for a call it never saw.
    """

    __slots__ = ("generation", "recording")

    def __init__(self) -> None:
        super().__init__()
        self.generation = generation.current
        self.recording = False


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


def choose_again(resolved: ResolvedOp, kept: torch.Tensor, chosen: torch.Tensor) -> None:
    """Make a recomputed choice of blocks the forward's, which backward will read. Comparing would wait for the device.

    Raises FastacError when there are more or fewer blocks than in the forward.
    """
    if kept.shape != chosen.shape:
        raise FastacError(
            f"recompute chose other blocks for {resolved.name} than the forward did: a table of {tuple(chosen.shape)} "
            f"where there was one of {tuple(kept.shape)}. What it chooses by must repeat itself exactly."
        )
    chosen.copy_(kept)
