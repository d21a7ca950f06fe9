"""Recompute compared with the forward: metadata of every tensor that autograd saves in a region, and its values.

Checkpointing assumes that a block computes the same again. What it reads besides its arguments may have changed before
backward (an adapter, its scale, a cache, a context variable), and then shapes agree and gradients are wrong. A
fingerprint is a tensor's 2-norm, and its sum with weights that grow from 1 to 2 along a dimension, for its two longest
dimensions: tokens that change places are seen as well. Whole numbers have exact sums. Which regions have fingerprints
is decided by `fastac.checkpoint`: few of them, so that the cost vanishes.

A change of every element by a relative d, with signs of its own, moves all three by about d times the norm; so does
the noise of kernels that add up in another order. `tolerance` is what such noise can reach. On a CPU the comparison
raises in the backward that recomputes; on an accelerator nothing waits for it: `check_pending` reads it later.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import BlockRecord, describe, module_of, modules_in
from fastac.engine.tape import RecomputeError, engine
from fastac.errors import class_name

Metadata = tuple[torch.Size, torch.dtype, torch.device, int]

metadata: Callable[[torch.Tensor], Metadata] = operator.attrgetter("shape", "dtype", "device", "_version")
"""What is compared of every tensor in every step. The last counts how often it was written."""


def changed(function: Any, forward: Metadata, tensor: torch.Tensor, writes: Writes) -> RecomputeError | None:
    """The error for a tensor whose metadata is not that of the forward; None for one that was only written again.

    What a recompute makes anew may well be written more or less often. Weights and buffers may not, but by the block
    itself.
    """
    again = metadata(tensor)
    if forward[:-1] != again[:-1]:
        what = f"saves {_readable(again)} where the forward saved {_readable(forward)}"
    else:
        # A Linear module saves a view of its weight. A view of a buffer may be of a part that nobody wrote: of a cache.
        written = tensor._base if isinstance(tensor._base, torch.nn.Parameter) else tensor
        names = {one: name for module in owners_of(function) for name, one in _state_of(module)}
        if not (isinstance(written, torch.nn.Parameter) or written in names) or writes.include(written):
            return None
        name = names.get(written, f"a parameter {tuple(written.shape)}")
        what = f"uses {name} otherwise than the forward did: it was written between forward and backward "
        what += "(optimizer.step, an EMA swap, load_state_dict), or another adapter is active"
    return RecomputeError(
        f"{describe(function)}: recompute {what}.\nGradients would be wrong. Let what a block reads besides its "
        f'arguments be as it is until backward is done; determinism_check="none" switches off this check alone.'
    )


class Writes:
    """What a block writes itself of its weights and buffers, in a recompute of it: made when that begins.

    The first one finds out whether it writes any, and leaves it on the block's record.
    """

    def __init__(self, function: Any, record: BlockRecord) -> None:
        self.record = record
        modules = [] if record.writes is False else owners_of(function)
        self._versions = {one: one._version for module in modules for _, one in _state_of(module)}

    def include(self, tensor: torch.Tensor) -> bool:
        """Whether the block has written a tensor."""
        return self._versions.get(tensor, tensor._version) != tensor._version

    def end(self) -> None:
        """The recompute has ended."""
        if self.record.writes is None:
            self.record.writes = any(map(self.include, self._versions))


def owners_of(function: Any) -> list[torch.nn.Module]:
    """The module that a function is, or is a method of; else those that it holds."""
    module = module_of(function)
    return modules_in(function) if module is None else [module]


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _readable(one: Metadata) -> str:
    return f"a tensor {tuple(one[0])} {str(one[1]).removeprefix('torch.')} on {one[2]}"


_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, torch.complex64), torch.float32),
    **dict.fromkeys((torch.float64, torch.complex128), torch.float64),
    **dict.fromkeys((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
}
"""Types that have fingerprints, with those they are added up in. Without: float8 and smaller, which torch adds up only
as copies, and bytes (uint8), which hold workspaces of kernels and packed weights."""


_PART = 2**16
"""Elements of a tensor that are copied at once, so that a step in which values are compared has the peak of others."""


class Fingerprint(NamedTuple):
    """Of one tensor. Numbers of a tensor on an accelerator are tensors there, which nobody has waited for.

    norm: 0 for whole numbers.
    """

    dtype: torch.dtype
    sums: list[Any]
    norm: Any

    @property
    def is_read_later(self) -> bool:
        """Whether its numbers are on an accelerator."""
        return isinstance(self.norm, torch.Tensor)


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None for one without plain values: a subclass, sparse, empty, on "meta".

    None as well for one or two whole numbers: attention kernels save a seed that they leave unset where they draw
    nothing.
    """
    wide = _WIDE.get(tensor.dtype)
    if wide is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.numel() <= (2 if wide is torch.int64 else 0):
        return None
    with torch_private.without_modes(), torch.no_grad():
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        longest = sorted(range(values.dim()), key=lambda dim: values.shape[dim])[-2:]
        parts = _parts(values, longest[-1], wide) if longest else [values]
        sums = [_weighted_sum(parts, dim, longest[-1], wide) for dim in longest] or [values.sum(dtype=wide)]
        norm = values.new_zeros((), dtype=wide)
        if wide is not torch.int64:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one, dtype=wide) for one in parts]))
        numbers: list[Any] = [*sums, norm]
        if tensor.device.type == "cpu":
            numbers = [one.item() for one in numbers]
    return Fingerprint(tensor.dtype, numbers[:-1], numbers[-1])


def _parts(values: torch.Tensor, dim: int, wide: torch.dtype) -> Sequence[torch.Tensor]:
    """A tensor, in parts along a dimension where adding it up in a wider type makes a copy: the CPU does that."""
    if values.dtype is wide or values.device.type != "cpu":
        return [values]
    return torch.split(values, max(1, _PART * values.shape[dim] // values.numel()), dim)


def _weighted_sum(parts: Sequence[torch.Tensor], dim: int, divided: int, wide: torch.dtype) -> torch.Tensor:
    """The sum with weights that grow along `dim`. divided: the dimension that the parts follow each other in."""
    others = [other for other in range(parts[0].dim()) if other != dim]
    sums = [one.sum(others, dtype=wide) if others else one.to(wide) for one in parts]
    along = torch.cat(sums) if dim == divided else torch.stack(sums).sum(0)
    weights = torch.arange(len(along), 2 * len(along), dtype=wide, device=along.device)
    total = (along * weights).sum()
    return total if wide is torch.int64 else total / len(along)


def tolerance(dtype: torch.dtype) -> float:
    """How far apart, relative to the norm, the numbers of equal computations may be.

    8 units in the last place (6.3 % in bf16, 0.8 % in fp16), and 1024 units of the type that sums are accumulated in
    (0.012 % in fp32): a million terms, added up in another order, differ by the square root of that. Kernels that
    accumulate in fp32 and round once reach 1.5 units; where parts are rounded before they are added up, 5 is usual, and
    9 is passed once in twenty trainings (`pytest -m soak tests/ways/test_no_false_alarm.py`). Whole numbers are equal
    or not.
    """
    wide = _WIDE[dtype]
    return 0.0 if wide is torch.int64 else 8 * torch.finfo(dtype).eps + 1024 * torch.finfo(wide).eps


def relative_difference(forward: Fingerprint, again: Fingerprint) -> float:
    """How far apart two fingerprints are, relative to the norm: 0 where they are equal, infinite for whole numbers."""
    largest, scale = 0.0, max(float(forward.norm), float(again.norm))
    for one, other in zip((*forward.sums, forward.norm), (*again.sums, again.norm), strict=True):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            apart = float(abs(one - other)) / scale if scale else math.inf
            largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest


class Difference(NamedTuple):
    """Two fingerprints of a tensor, of forward and recompute. allowed: noise. where: what computed it, for messages."""

    forward: Fingerprint
    again: Fingerprint
    allowed: float
    where: str


class Comparison:
    """Compares what one recompute saves with the fingerprints of its forward, in their order.

    function: that runs again, for messages. ends: code of the frame that calls it.
    """

    def __init__(self, function: Any, fingerprints: Iterable[Fingerprint | None], ends: types.CodeType) -> None:
        self.function = function
        self.ends = ends
        self._fingerprints = iter(fingerprints)
        self._allowed = 0.0  # the noise of the coarsest type so far, which is in all that follows
        self._differences: list[Difference] = []

    def add(self, tensor: torch.Tensor, is_needed: bool) -> None:
        """Compare the next tensor that is saved, unless nobody needs it any more."""
        forward = next(self._fingerprints)
        again = fingerprint(tensor) if is_needed and forward is not None else None
        if forward is None or again is None:
            return
        allowed = tolerance(forward.dtype)
        if allowed:
            allowed = self._allowed = max(self._allowed, allowed)
        if forward.is_read_later or relative_difference(forward, again) > allowed:
            where = place(module_of(self.function), tensor, self.ends)
            if where is not None:
                self._differences.append(Difference(forward, again, allowed, where))

    def check(self) -> None:
        """Raise RecomputeError where something differs, at once where that waits for no device."""
        if any(one.forward.is_read_later for one in self._differences):
            engine.pending.append((describe(self.function), self._differences))
        elif self._differences:
            _check(describe(self.function), self._differences)


def check_pending() -> None:
    """Raise RecomputeError for recomputes on an accelerator that were not what the forward was. Waits for it."""
    pending, engine.pending = engine.pending, []  # one error is enough for what one change did
    for function, differences in pending:
        _check(function, differences)


def _check(function: str, differences: list[Difference]) -> None:
    for forward, again, allowed, where in differences:
        apart = relative_difference(forward, again)
        if apart > allowed:
            seen = f"relative difference {apart:.1e}, {allowed:.1e} is noise" if allowed else "whole numbers differ"
            raise RecomputeError(
                f"{function}: recompute does not compute what the forward did. The first difference is {where} "
                f"({seen}).\nSomething besides its arguments changed before backward: an adapter or its scale, "
                f"weights, a cache, a context variable, or a state that the block changes itself. Gradients would be "
                f"wrong, and may have been before: values are compared in steps 0, 1, 2, 4, 8, ...\n"
                f"Keep it until backward is done (a LoRA's scale: by set_adapters), or pass it to the block; "
                f'determinism_check="none" switches off this check alone.'
            )


def place(module: torch.nn.Module | None, tensor: torch.Tensor, ends: types.CodeType) -> str | None:
    """What has computed a tensor that autograd is about to save, and which module inside `module` saves it, in words.

    ends: code of the frame that the search for a module ends with. Reading the local variables of frames beyond it
    would keep them alive. None for running statistics, or a copy of them: norms of batches and instances write them,
    and in training do not use them in backward.
    """
    names = {} if module is None else {inner: name for name, inner in module.named_modules()}
    op = "" if tensor.grad_fn is None else re.sub(r"Backward\d*$", "", tensor.grad_fn.name())
    result = f"the result of {op}" if op else f"a tensor {tuple(tensor.shape)}"
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not ends:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            if getattr(owner, "running_mean", None) is not None and tensor.dim() == 1 and not tensor.requires_grad:
                return None
            if module is None or owner in names:
                return f"{result}, saved by {names.get(owner) or class_name(owner)}"
        frame = frame.f_back
    return result
