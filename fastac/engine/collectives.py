"""What the collectives of one region did: saved, or issued, and issued again in recompute.

A functional collective returns before it is complete, and a wait for the same memory completes it. What nobody guards,
inside an autograd.Function or compiled code, may be overwritten after that, so that it is copied then and not before.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastac.engine import torch_private

_POINT_TO_POINT = ("batch_p2p_ops", "irecv", "isend")
_NOT_COUNTED = ("barrier", "monitored_barrier_", "check_for_nan")


@dataclasses.dataclass
class Communication:
    """Numbers and bytes of the collectives of one region; the bytes are those of what each returns on this rank.

    issued: in the forward. saved: of these, those whose outputs are kept. again: issued in recompute.
    pending: while the forward runs, what is kept and not waited for: by its memory, what keeps a copy instead.
    """

    issued: int = 0
    issued_bytes: int = 0
    saved: int = 0
    saved_bytes: int = 0
    again: int = 0
    again_bytes: int = 0
    pending: dict[object, list[Callable[[], None]]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __add__(self, other: Communication) -> Communication:
        """Both together."""
        return Communication(
            self.issued + other.issued,
            self.issued_bytes + other.issued_bytes,
            self.saved + other.saved,
            self.saved_bytes + other.saved_bytes,
            self.again + other.again,
            self.again_bytes + other.again_bytes,
        )

    def forward(self, outputs: Any) -> None:
        """Count one that was issued in the forward."""
        self.issued += 1
        self.issued_bytes += _bytes(outputs)

    def repeat(self, outputs: Any) -> None:
        """Count one that was issued in recompute."""
        self.again += 1
        self.again_bytes += _bytes(outputs)

    def keep(self, kept: Sequence[Any], copy: Callable[[int], None] | None) -> None:
        """Count one whose outputs are kept. copy: keeps a copy of one of them instead, where autograd guards none."""
        self.saved += 1
        self.saved_bytes += _bytes(kept)
        if copy is not None:
            for position, tensor in enumerate(kept):
                copies = self.pending.setdefault(torch_private.memory(tensor), [])
                copies.append(functools.partial(copy, position))

    def complete(self, tensor: torch.Tensor) -> None:
        """A collective was waited for: copy what it returned, where nobody guards it."""
        for copy in self.pending.pop(torch_private.memory(tensor), ()) if self.pending else ():
            copy()


def _bytes(outputs: Any) -> int:
    return sum(tensor.nbytes for tensor in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))


def writes_its_buffer(op: Any) -> bool:
    """Whether an op is a collective that writes a buffer of the caller's, which is never saved."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "c10d":
        return name not in _NOT_COUNTED
    return namespace == "_c10d_functional" and (op._schema.is_mutable or name in _POINT_TO_POINT)


def is_called_by_fsdp() -> bool:
    """Whether it is FSDP that calls here. It gathers and frees parameters by its own rules, in recompute, too.

    What it calls in turn, such as a model inside FSDP1, calls for itself.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed.fsdp"):
            return True
        if not module.startswith(("torch.", "fastac.")):
            return False
        frame = frame.f_back
    return False
