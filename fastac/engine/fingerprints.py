"""Recompute compared with the forward by value: a fingerprint of every tensor that autograd saves in a region.

Checkpointing assumes that a block computes the same again. What it reads besides its arguments may have changed before
backward (an adapter, its scale, a cache, a context variable), and then shapes agree and gradients are wrong. A
fingerprint is the sum of a tensor and its 2-norm, of whole numbers the sum. Which regions have fingerprints is
decided by `fastac.checkpoint`: few of them, so that the cost vanishes.

A change of every element by a relative d, with signs of its own, moves both numbers by about d times the norm; so does
the noise of kernels that add up in another order. `tolerance` is what such noise can reach. On a CPU the comparison
raises in the backward that recomputes; on an accelerator nothing waits for it: `check_pending` reads it later.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, NamedTuple

import torch

from fastac.engine import torch_private
from fastac.engine.tape import RecomputeError, engine
from fastac.errors import class_name


class Fingerprint(NamedTuple):
    """Of one tensor. Numbers of a tensor on an accelerator are tensors there, which nobody has waited for."""

    dtype: torch.dtype
    total: Any
    norm: Any


class Difference(NamedTuple):
    """Two fingerprints of a tensor, of forward and recompute. where: what computed it, for messages."""

    forward: Fingerprint
    again: Fingerprint
    where: str


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None for one without plain values.

    Those are subclasses, sparse, empty, fake and meta tensors, and bytes (uint8), which hold the workspaces of kernels.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype is torch.uint8:
        return None
    with torch_private.without_modes(), torch.no_grad():
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        total: Any
        norm: Any = None
        if not values.is_floating_point():
            total = values.sum()
        else:
            if values.element_size() == 1:  # float8, which nothing is added up in
                values = values.float()
            wide = torch.float64 if values.dtype is torch.float64 else torch.float32
            total, norm = values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)
        if tensor.device.type == "cpu":
            total, norm = total.item(), None if norm is None else norm.item()
    return Fingerprint(tensor.dtype, total, norm)


def tolerance(dtype: torch.dtype) -> float:
    """How far apart, relative to the norm, the numbers of equal computations may be.

    4 units in the last place, for results that are rounded again and again, and 1024 of the type that sums are
    accumulated in: a million terms, added up in another order, differ by the square root of that. Whole numbers are
    equal or not.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    accumulated = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    return 4 * torch.finfo(dtype).eps + 1024 * torch.finfo(accumulated).eps


def relative_difference(forward: Fingerprint, again: Fingerprint) -> float:
    """How far apart two fingerprints are, relative to the norm: 0 where they are equal, infinite for whole numbers."""
    if forward.norm is None or again.norm is None:
        return 0.0 if forward.total == again.total else math.inf
    largest = 0.0
    for one, other in ((float(forward.total), float(again.total)), (float(forward.norm), float(again.norm))):
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        scale = max(float(forward.norm), float(again.norm))
        apart = abs(one - other) / scale
        largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest


def may_differ(forward: Fingerprint, again: Fingerprint) -> bool:
    """Whether two fingerprints are further apart than noise, or are on an accelerator, which nothing waits for here."""
    if isinstance(forward.total, torch.Tensor):
        return True
    return relative_difference(forward, again) > tolerance(forward.dtype)


def check(function: str, differences: list[Difference]) -> None:
    """Raise RecomputeError where fingerprints of a function's recompute are not those of its forward."""
    for forward, again, where in differences:
        apart = relative_difference(forward, again)
        allowed = tolerance(forward.dtype)
        if apart > allowed:
            seen = f"relative difference {apart:.1e}, {allowed:.1e} is noise" if allowed else "whole numbers differ"
            raise RecomputeError(
                f"{function}: recompute does not compute what the forward did. The first difference is {where} "
                f"({seen}).\nSomething besides its arguments changed before backward: an adapter or its scale, "
                f"weights, a cache, a context variable, or a state that the block changes itself.\n"
                f"Keep it until backward is done, or pass it as an argument; "
                f'determinism_check="none" switches this comparison off.'
            )


def check_pending() -> None:
    """Raise RecomputeError for recomputes on an accelerator that were not what the forward was. Waits for it."""
    while engine.pending:
        check(*engine.pending.pop(0))


def report(function: str, differences: list[Difference]) -> None:
    """Check what a recompute found, at once where that waits for no device."""
    if any(isinstance(one.forward.total, torch.Tensor) for one in differences):
        engine.pending.append((function, differences))
    else:
        check(function, differences)


def place(module: Any, tensor: torch.Tensor) -> str:
    """What has computed a tensor that autograd is about to save, and which module inside `module` saves it."""
    names = {inner: name for name, inner in module.named_modules()} if isinstance(module, torch.nn.Module) else {}
    op = "" if tensor.grad_fn is None else re.sub(r"Backward\d*$", "", tensor.grad_fn.name())
    result = f"the result of {op}" if op else f"a tensor {tuple(tensor.shape)}"
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return f"{result} in {names.get(owner) or class_name(owner)}"
        frame = frame.f_back
    return result
