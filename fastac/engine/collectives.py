"""The collectives of one region: how many were issued, saved, and issued again in recompute.

A functional collective returns before it is complete, and a wait for the same memory completes it. Inside an
autograd.Function or compiled code autograd does not guard the output, which may be overwritten after the wait. So the
tape copies it at the wait.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import Any

import torch

_POINT_TO_POINT = ("batch_p2p_ops", "irecv", "isend")
# These ops of c10d take no tensor of the caller, or only read it.
_NOT_COUNTED = ("barrier", "monitored_barrier_", "check_for_nan")


@dataclasses.dataclass
class Communication:
    """Numbers of the collectives of one region, and bytes that they returned on this rank."""

    # Collectives of the forward; how many of these are saved; collectives of recompute.
    issued: int = 0
    issued_bytes: int = 0
    saved: int = 0
    saved_bytes: int = 0
    again: int = 0
    again_bytes: int = 0

    def __add__(self, other: Communication) -> Communication:
        """The sums of both."""
        return Communication(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def count(self, how: str, outputs: Any) -> None:
        """Count a collective, and the bytes of its outputs. how: "issued", "saved" or "again"."""
        size = sum(output.nbytes for output in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))
        for name, more in ((how, 1), (f"{how}_bytes", size)):
            setattr(self, name, getattr(self, name) + more)


def writes_its_buffer(op: Any) -> bool:
    """Whether an op is a collective that writes a buffer of its caller, and so is never saved."""
    # A replay would not write the buffer: gradients were NaN, without an error.
    if not isinstance(op, torch._ops.OpOverload):
        return False
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "c10d":
        return name not in _NOT_COUNTED
    return namespace == "_c10d_functional" and (op._schema.is_mutable or name in _POINT_TO_POINT)


def is_called_by_fsdp() -> bool:
    """Whether FSDP calls this. It gathers and frees parameters by its own rules, also in recompute."""
    # The nearest frame outside torch and fastac belongs to the model. FSDP1 calls the model, so frames beyond it would
    # say FSDP for every collective of the model.
    frame = sys._getframe().f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed.fsdp"):
            return True
        if not module.startswith(("torch.", "fastac.")):
            return False
        frame = frame.f_back
    return False
