"""Compares a recompute with its forward: metadata of every tensor that autograd saves in a region, and its values.

Checkpointing assumes that a block computes the same again. If something that it reads besides its arguments changes
before backward (an adapter, its scale, a cache, a context variable), shapes agree and gradients are wrong. Values are
compared by fingerprints: a tensor's 2-norm, and its sum with weights that grow from 1 to 2 along a dimension, for its
two longest dimensions. So tokens that change places are seen as well. Sums of integers are exact. `fastac.checkpoint`
decides which regions have fingerprints: few, so that the cost vanishes.

If every element changes by a relative d, with signs of its own, all three numbers move by about d times the norm; so
does the noise of kernels that add up in another order. `tolerance` is the most that such noise reaches. The backward
that recomputes raises: on a CPU at once, on an accelerator at its end, when all its numbers are read together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import operator
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import BlockState, describe, held_by, module_of
from fastac.engine.generators import tensors_in
from fastac.engine.tape import RecomputeError, engine
from fastac.errors import class_name

Metadata = tuple[tuple[Any, ...], torch.dtype, torch.device, int]


_metadata = operator.attrgetter("shape", "dtype", "device", "_version")


def metadata(tensor: torch.Tensor) -> Metadata:
    """Compared for every tensor in every step. The version counts in-place changes."""
    try:
        return _metadata(tensor)
    except RuntimeError:  # a strided nested tensor has no shape
        return torch_private.shape_of(tensor), tensor.dtype, tensor.device, tensor._version


_SETTLED = 3
"""An op may save tensors before it runs. It has run when so many more are saved."""

Saved = tuple[int, torch.Tensor]
"""A tensor that autograd saves, and its place among them."""


class Settling:
    """Delays tensors that their op may write after it saved them: rrelu saves its noise before it draws it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Saved, Fingerprint | None]] = []

    def add(self, position: int, tensor: torch.Tensor) -> list[Saved]:
        """The tensors that are settled when the next one is saved."""
        count = sum(saved[0] <= position - _SETTLED for saved, _ in self.waiting)
        found = [saved for saved, _ in self.waiting[:count]]
        del self.waiting[:count]
        if _is_new(tensor):
            self.waiting.append(((position, tensor), fingerprint(tensor)))
        else:
            found.append((position, tensor))
        return found

    def end(self) -> tuple[list[Saved], bool]:
        """The remaining ones, as all ops have run, and whether one of them was written since."""
        found, self.waiting = self.waiting, []
        written = any(_differ(before, fingerprint(tensor)) for (_, tensor), before in found)
        return [saved for saved, _ in found], written


def _is_new(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be memory that its op has yet to write: floats in no graph, never written in place."""
    if tensor.requires_grad or tensor._version or not tensor.is_floating_point():
        return False
    return not (tensor._is_view() or isinstance(tensor, torch.nn.Parameter))


class Difference(NamedTuple):
    """A tensor that may differ between forward and recompute."""

    block: str  # in words
    forward: Fingerprint
    again: Fingerprint
    allowed: float  # the noise between the two
    where: str  # the tensor's op and module, in words
    found: str  # what may explain it, as a line with its break


@dataclasses.dataclass
class Comparison:
    """Compares the tensors that one recompute saves with those of its forward, in their order."""

    function: Any
    modules: Sequence[torch.nn.Module]
    """The block, or those that the function may run."""
    block_state: BlockState
    """Of the block. The first recompute notes there whether the block writes weights of its own."""
    fingerprints: Sequence[Fingerprint | None]
    """Of the tensors that the forward saved, if values are compared."""
    ends: types.CodeType
    """Code of the frame that calls the function."""
    found: Callable[[], str]
    """What may explain a difference, as a line with its break."""

    def __post_init__(self) -> None:
        self._rewritten: set[str] = set()  # as in the state, where it comes once nothing differed
        self._position = -1
        self._settling = Settling()
        self._allowed = 0.0  # the noise of the coarsest dtype so far, which is in all that follows
        self._error: RecomputeError | None = None  # of the first tensor whose metadata differ
        self._differences: list[Difference] = []
        weights = [] if self.block_state.writes is False else _weights(self.function, self.modules)
        self._versions = {one: one._version for one in weights if not one.is_inference()}

    def add_metadata(self, forward: Metadata, tensor: torch.Tensor) -> None:
        """Note a tensor whose metadata differ from those of the forward.

        A tensor that recompute makes may have another version: it may be written more or less often. A weight or a
        buffer may not, unless the block writes it itself. If nobody is found who does, and values are compared, these
        decide: weights may be streamed into one buffer.
        """
        again = metadata(tensor)
        if forward[:-1] != again[:-1]:
            what = f"saves {_readable(again)} where the forward saved {_readable(forward)}"
        else:
            # A Linear module saves a view of its weight. A view of a buffer may be a part of it that was not written.
            written = tensor._base if isinstance(tensor._base, torch.nn.Parameter) else tensor
            names = {one: name for module in self.modules for name, one in _state_of(module)}
            if not (isinstance(written, torch.nn.Parameter) or written in names) or self._is_written(written):
                return
            if written not in names and self._is_rewritten(tensor):
                return
            name = names.get(written, f"a parameter {tuple(written.shape)}")
            what = f"uses {name} otherwise than the forward did: it was written between forward and backward "
            what += "(optimizer.step, an EMA swap, load_state_dict), or another adapter is active"
        self._error = self._error or RecomputeError(
            f"{describe(self.function)}: recompute {what}.\n{self.found()}Gradients would be wrong. Keep what a block "
            f"reads besides its arguments unchanged until backward is done (an adapter, a cache, random numbers); "
            f'determinism_check="none" switches off this check alone.'
        )

    def _is_rewritten(self, weight: torch.Tensor) -> bool:
        """Whether a weight was written with the values that it had, here or in a step that compared them."""
        if not self.fingerprints:
            return "weights" in self.block_state.rewritten
        before = self.fingerprints[self._position + 1]
        again = fingerprint(weight)
        if before is None or again is None or _differ(before, again):
            return False
        self._rewritten.add("weights")
        return True

    def inputs_are_rewritten(self) -> bool:
        """Whether an input that was written counts as unchanged: values are compared, or were in an earlier step."""
        if self.fingerprints:
            self._rewritten.add("inputs")
            return True
        return "inputs" in self.block_state.rewritten

    def add_values(self, tensor: torch.Tensor | None) -> None:
        """Compare the values of the next tensor that is saved; None for one that no autograd node needs any longer."""
        self._position += 1
        if tensor is not None:
            self._compare(self._settling.add(self._position, tensor))

    def _compare(self, settled: Iterable[Saved]) -> None:
        for position, tensor in settled:
            forward = self.fingerprints[position] if self._error is None else None
            again = None if forward is None else fingerprint(tensor)
            if forward is None or again is None:
                continue
            allowed = tolerance(forward.dtype)
            if allowed:
                allowed = self._allowed = max(self._allowed, allowed)
            if forward.is_read_later or relative_difference(forward, again) > allowed:
                where = place(module_of(self.function), tensor, self.ends)
                if where is not None:
                    found = self._differences[0].found if self._differences else self.found()
                    block = describe(self.function)
                    self._differences.append(Difference(block, forward, again, allowed, where, found))

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the block has written a weight in this recompute."""
        return self._versions.get(tensor, tensor._version) != tensor._version

    def check(self) -> None:
        """Raise RecomputeError if something differs; for values on an accelerator, at the end of this backward."""
        if self.block_state.writes is None:
            self.block_state.writes = any(map(self._is_written, self._versions))
        self._compare(self._settling.end()[0])
        if self._error is not None:
            raise self._error
        _check(one for one in self._differences if not one.forward.is_read_later)
        self.block_state.rewritten |= self._rewritten
        if self._differences:
            _check_at_end_of_backward(self._differences)


class _Unread:
    """Differences found in one backward whose numbers are on an accelerator.

    Only the callback of that backward holds it. A backward that raises drops it, and no other one hears of it.
    """

    def __init__(self, differences: list[Difference]) -> None:
        self.differences = differences

    def check(self) -> None:
        """Read all numbers, and raise RecomputeError if some differ."""
        read = iter(_read([fingerprint for one in self.differences for fingerprint in (one.forward, one.again)]))
        _check(one._replace(forward=next(read), again=next(read)) for one in self.differences)


def _check_at_end_of_backward(differences: list[Difference]) -> None:
    # A saved tensor may be read outside a backward.
    backward = -1 if torch_private.in_compiled_autograd() else torch_private.running_backward()
    unread = engine.unread.get(backward)
    if unread is not None:
        unread.differences += differences
        return
    unread = _Unread(differences)
    if backward == -1:
        unread.check()
    else:
        engine.unread[backward] = unread
        torch_private.at_end_of_backward(unread.check)


_FORMATS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}
"""Dtype of a number -> its letter in a format of `struct`."""


def _read(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """The fingerprints with numbers on the host. Waits for the accelerator once: the bytes of all come together."""
    numbers = [number for one in fingerprints for number in (*one.sums, one.norm)]
    device = numbers[0].device
    with torch_private.without_modes():
        parts = [number.reshape(1).view(torch.uint8) for number in numbers]
        data = bytes(torch.cat([part if part.device == device else part.to(device) for part in parts]).tolist())
    values = iter(struct.unpack("=" + "".join(_FORMATS[number.dtype] for number in numbers), data))
    return [Fingerprint(one.dtype, [next(values) for _ in one.sums], next(values)) for one in fingerprints]


def _check(differences: Iterable[Difference]) -> None:
    for block, forward, again, allowed, where, found in differences:
        apart = relative_difference(forward, again)
        if apart > allowed:
            seen = f"relative difference {apart:.1e}, {allowed:.1e} is noise" if allowed else "whole numbers differ"
            raise RecomputeError(
                f"{block}: recompute does not compute what the forward did. The first difference is {where} "
                f"({seen}).\n{found}Something besides its arguments changed before backward: an adapter or its scale, "
                f"weights, a cache, a context variable, random numbers of another generator than the default one, or a "
                f"state that the block changes itself. Gradients would be wrong, and may have been before: values are "
                f"compared in steps 0, 1, 2, 4, 8, ...\n"
                f"Keep it unchanged until backward is done (a LoRA's scale: by set_adapters), or pass it to the block; "
                f'determinism_check="none" switches off this check alone.'
            )


def _weights(function: Any, modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The weights that a function may write: those of modules, and those that a wrapper around a block holds itself."""
    return [*(one for module in modules for one in module.parameters()), *tensors_in(held_by(function))]


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _readable(one: Metadata) -> str:
    return f"a tensor {tuple(one[0])} {str(one[1]).removeprefix('torch.')} on {one[2]}"


def place(module: torch.nn.Module | None, tensor: torch.Tensor, ends: types.CodeType) -> str | None:
    """In words: the op that computed a tensor that autograd is about to save, and the module in `module` that saves it.

    None for running statistics, or a copy of them: norms of batches and instances write them, and do not use them in
    backward. ends: code of the frame at which the search for the module ends. Reading the local variables of frames
    beyond it would keep them alive.
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


# Fingerprints

_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, torch.complex64), torch.float32),
    **dict.fromkeys((torch.float64, torch.complex128), torch.float64),
    **dict.fromkeys((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
}
"""Dtype that has fingerprints -> dtype of its sums. Missing are float8 and smaller, which torch adds up only as copies,
and uint8, which holds workspaces of kernels and packed weights."""


class Fingerprint(NamedTuple):
    """Numbers of one tensor. If it is on an accelerator, they are tensors there, and not waited for."""

    dtype: torch.dtype
    sums: list[Any]
    norm: Any  # 0 for integers

    @property
    def is_read_later(self) -> bool:
        """Whether its numbers are on an accelerator."""
        return isinstance(self.norm, torch.Tensor)


COMPARISON = "fastac::comparison"
"""Name of a fingerprint in the profile of fastac.verify."""


def _named() -> contextlib.AbstractContextManager[Any]:
    return torch.profiler.record_function(COMPARISON) if engine.replayed_calls else contextlib.nullcontext()


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None for one without plain values: a subclass, sparse, nested, empty, on "meta".

    None also for one or two integers: attention kernels save a seed that they leave unset if they draw nothing.
    """
    wide = _WIDE.get(tensor.dtype)
    if wide is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() <= (2 if wide is torch.int64 else 0):
        return None
    if not tensor.untyped_storage().nbytes():  # somebody has freed it, as FSDP does
        return None
    with torch_private.without_modes(), torch.no_grad(), _named():
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        longest = sorted(range(values.dim()), key=lambda dim: values.shape[dim])[-2:]
        sums = [_weighted_sum(values, dim, wide) for dim in longest] or [values.sum(dtype=wide)]
        is_integer = wide is torch.int64
        norm = values.new_zeros((), dtype=wide) if is_integer else torch.linalg.vector_norm(values, dtype=wide)
        numbers: list[Any] = [*sums, norm]
        if tensor.device.type == "cpu":
            numbers = [one.item() for one in numbers]
    return Fingerprint(tensor.dtype, numbers[:-1], numbers[-1])


def _weighted_sum(values: torch.Tensor, dim: int, wide: torch.dtype) -> torch.Tensor:
    """The sum with weights that grow from 1 to 2 along `dim`; for integers, from its length to twice that."""
    others = [other for other in range(values.dim()) if other != dim]
    along = values.sum(others, dtype=wide) if others else values.to(wide)
    weights = torch.arange(len(along), 2 * len(along), dtype=wide, device=along.device)
    total = (along * weights).sum()
    return total if wide is torch.int64 else total / len(along)


def tolerance(dtype: torch.dtype) -> float:
    """The most by which fingerprints of equal computations differ, relative to the norm; 0 for integers.

    8 units in the last place (6.3 % in bf16, 0.8 % in fp16), and 1024 units of the dtype of sums (0.012 % in fp32): a
    million terms, added up in another order, differ by the square root of that. Kernels that accumulate in fp32 and
    round once stay below 2 units in 80 trainings (`pytest -m soak tests/ways/test_no_false_alarm.py`).
    """
    wide = _WIDE[dtype]
    return 0.0 if wide is torch.int64 else 8 * torch.finfo(dtype).eps + 1024 * torch.finfo(wide).eps


def _differ(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Whether two fingerprints are unequal; no, where there is none."""
    return one is not None and other is not None and relative_difference(one, other) > 0


def relative_difference(forward: Fingerprint, again: Fingerprint) -> float:
    """Difference of two fingerprints, relative to the norm: 0 where they are equal, infinite for unequal integers."""
    largest, scale = 0.0, max(float(forward.norm), float(again.norm))
    for one, other in zip((*forward.sums, forward.norm), (*again.sums, again.norm), strict=True):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            apart = float(abs(one - other)) / scale if scale else math.inf
            largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest
