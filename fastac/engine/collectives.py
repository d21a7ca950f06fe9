"""The collectives of one region: how many were issued, saved, and issued again in recompute.

A functional collective returns before it is complete, and a wait for the same memory completes it. An output that
autograd does not guard, inside an autograd.Function or compiled code, may be overwritten after that: the tape copies it
when it is waited for.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import Any

import torch

_POINT_TO_POINT = ("batch_p2p_ops", "irecv", "isend")
_NOT_COUNTED = ("barrier", "monitored_barrier_", "check_for_nan")


@dataclasses.dataclass
class Communication:
    """Numbers of the collectives of one region, and bytes that they returned on this rank."""

    issued: int = 0  # in the forward
    issued_bytes: int = 0
    saved: int = 0  # of issued
    saved_bytes: int = 0
    again: int = 0  # issued in recompute
    again_bytes: int = 0

    def __add__(self, other: Communication) -> Communication:
        """Both together."""
        return Communication(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def count(self, how: str, outputs: Any) -> None:
        """Count a collective, and the bytes of its outputs. how: "issued", "saved" or "again"."""
        size = sum(one.nbytes for one in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))
        for name, more in ((how, 1), (f"{how}_bytes", size)):
            setattr(self, name, getattr(self, name) + more)


def writes_its_buffer(op: Any) -> bool:
    """Whether an op is a collective that writes a buffer of its caller, and so is never saved."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "c10d":
        return name not in _NOT_COUNTED
    return namespace == "_c10d_functional" and (op._schema.is_mutable or name in _POINT_TO_POINT)


def is_called_by_fsdp() -> bool:
    """Whether FSDP calls this, which gathers and frees parameters by its own rules, also in recompute.

    A model that FSDP1 calls does not count as FSDP.
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
