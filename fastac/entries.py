"""One attention call or collective of a region: what is kept of it, and what its replay is checked by."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastac import torch_internals
from fastac.registry import ResolvedOp
from fastac.selection import Selection


class Entry:
    """One attention call or collective of a region.

    kept: its outputs; None where the policy recomputes it. single: whether it returns one tensor and no sequence.
    guarded: whether autograd notices an in-place change of them; versions: how often each was changed when it was kept.
    """

    kept: Sequence[Any] | None = None
    single = False
    versions: Sequence[int | None] = ()
    guarded = False
    linear = ""  # the Linear module whose product it is, by its name in the block
    generator_states: Mapping[torch.device, torch.Tensor] = {}
    selection: Selection | None = None

    def __init__(self, resolved: ResolvedOp, keys: int, inputs: Sequence[Any]) -> None:
        self.resolved = resolved
        self.keys = keys
        self.inputs = inputs

    def keep(self, outputs: Any, guarded: bool, copied: bool) -> None:
        """Keep what the call has returned, or a copy of it."""
        self.single = isinstance(outputs, torch.Tensor)
        self.guarded = guarded
        sequence = (outputs,) if self.single else outputs
        self._hold(torch_internals.clones(sequence) if copied else torch_internals.aliases(sequence))

    def forget(self) -> None:
        """Keep nothing after all: the call runs again."""
        self.kept, self.versions, self.selection, self.generator_states = None, (), None, {}

    def copy(self, position: int) -> None:
        """Keep a copy of one output in the place of itself."""
        kept = list(self.kept or ())
        kept[position : position + 1] = torch_internals.clones(kept[position : position + 1])
        self._hold(tuple(kept))

    def _hold(self, kept: Sequence[Any]) -> None:
        self.kept, self.versions = kept, torch_internals.versions(kept)

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that the kept outputs hold."""
        chosen = self.selection.tensors if self.selection is not None else ()
        tensors = [value for value in (*(self.kept or ()), *chosen) if isinstance(value, torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class _Generation:
    """How many ops are intercepted so far, and which place each of them has among them, by its qualified name."""

    def __init__(self) -> None:
        self.current = 0
        self.places: dict[str, int] = {}

    def add(self, name: str) -> None:
        """Count one more. A region that is open meanwhile has begun without it and goes on without it."""
        self.places[name] = self.current + 1
        self.current += 1


generation = _Generation()


class CountedOps:
    """The ops that count in one region: those that were intercepted when it began, and those that were let in since.

    Without that, a row registered between a forward and its recompute would ask the region for a call it never saw.
    """

    def __init__(self) -> None:
        self.generation = generation.current
        self.late: set[str] = set()

    def __contains__(self, resolved: ResolvedOp) -> bool:
        name = resolved.qualified_name
        return generation.places.get(name, sys.maxsize) <= self.generation or name in self.late

    def let_in(self, resolved: ResolvedOp) -> None:
        """Count an op that was intercepted since the region began, and has not been called in it before."""
        self.late.add(resolved.qualified_name)


def described(args: Sequence[Any]) -> list[Any]:
    """What of a call's first tensors must be alike in forward and recompute."""
    return [(a.shape, a.stride(), a.dtype) for a in args[:3] if isinstance(a, torch.Tensor)]


def readable(inputs: Sequence[Any]) -> str:
    """What `described` tells, for messages, and other arguments as they are."""
    return ", ".join(_readable(one) for one in inputs)


def _readable(one: Any) -> str:
    if isinstance(one, tuple) and one and isinstance(one[0], torch.Size):
        return f"{tuple(one[0])} {str(one[2]).removeprefix('torch.')}"
    return str(one)
