"""Which collectives write a buffer of their caller, and which of them are FSDP's own."""

from __future__ import annotations

import sys
from typing import Any

import torch

_POINT_TO_POINT = ("batch_p2p_ops", "irecv", "isend")
# These ops of c10d take no tensor of the caller, or only read it.
_NOT_COUNTED = ("barrier", "monitored_barrier_", "check_for_nan")


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
