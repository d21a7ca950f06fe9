"""Compares a recompute with its forward: metadata of every tensor that autograd saves in a region, and its values.

Checkpointing assumes that a block computes the same again. If something that it reads besides its arguments changes
before backward (an adapter, its scale, a cache, a context variable), shapes agree and gradients are wrong. Values are
compared by fingerprints: a tensor's 2-norm, and for each of its two longest dimensions its sum with weights that grow
from 1 to 2 along that dimension. The weights show tokens that change places. Sums of integers are exact.
`fastac.checkpoint` decides which regions have fingerprints: few, so that the cost vanishes.

If every element changes by a relative error d of random sign, all three numbers move by about d times the norm. Kernels
that add up in another order cause noise of this form, and `tolerance` is the most that it reaches. A difference is
raised in the backward that recomputes: on a CPU at once, on an accelerator at its end, when all numbers of this
backward are read together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastac.engine import causes, torch_private
from fastac.engine.blocks import BlockState, describe, held_by, module_of
from fastac.engine.generators import tensors_in
from fastac.engine.process import process
from fastac.engine.tape import RecomputeError
from fastac.errors import class_name

if TYPE_CHECKING:
    from fastac.engine.region import Region

_SETTLED = 3
"""An op may save tensors before it runs. It has run when this many more tensors are saved."""

Saved = tuple[int, torch.Tensor]
"""A tensor that autograd saves in a region, and its position among all of them."""


Pair = tuple["Fingerprint", "Fingerprint"]
"""Of one tensor at two times."""


class Settling:
    """Delays tensors that their op may write after it saved them: rrelu saves its noise before it draws it.

    Args:
        tells_early: whether `end` tells which of the remaining ones were written, by fingerprints.
    """

    def __init__(self, tells_early: bool = False) -> None:
        self.tells_early = tells_early
        self.waiting: list[tuple[Saved, Fingerprint | None]] = []

    def add(self, position: int, tensor: torch.Tensor) -> list[Saved]:
        """Note the next tensor that is saved. Returns the tensors that are settled by then."""
        count = sum(saved[0] <= position - _SETTLED for saved, _ in self.waiting)
        settled = [saved for saved, _ in self.waiting[:count]]
        del self.waiting[:count]
        if _is_new(tensor):
            self.waiting.append(((position, tensor), fingerprint(tensor) if self.tells_early else None))
        else:
            settled.append((position, tensor))
        return settled

    def end(self) -> tuple[list[Saved], list[Pair]]:
        """All ops have run. Returns the remaining tensors, and fingerprints: of when each was saved, and of now."""
        remaining, self.waiting = self.waiting, []
        pairs = [(before, now) for (_, t), before in remaining if before and (now := fingerprint(t))]
        return [saved for saved, _ in remaining], pairs


def _is_new(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be memory that its op has yet to write: floats outside any graph, never written in place."""
    if tensor.requires_grad or tensor._version or not tensor.is_floating_point():
        return False
    return not (tensor._is_view() or isinstance(tensor, torch.nn.Parameter))


class Difference(NamedTuple):
    """A tensor that may differ between forward and recompute."""

    forward: Fingerprint
    recomputed: Fingerprint
    # The noise that is allowed between the two.
    allowed: float
    # Makes the error. Its argument: the relative difference, in words.
    error: Callable[[str], RecomputeError]


def note_early(block_state: BlockState, pairs: Iterable[Pair]) -> list[Pair]:
    """Note whether a block writes what it saved last, by `Settling.end`. Returns the pairs that are yet to be read."""
    unread = []
    for pair in pairs:
        if pair[0].is_read_later:
            unread.append(pair)
        elif relative_difference(*pair) > 0:
            block_state.saves_early = True
    return unread


@dataclasses.dataclass
class Comparison:
    """Compares the tensors that one recompute saves with those of its forward, in their order."""

    region: Region
    ends: types.CodeType
    """Code of the frame that calls the region's function."""

    def __post_init__(self) -> None:
        self.block_state = self.region.block_state
        # One for each tensor that the forward saved, if values are compared.
        self.fingerprints = self.region.fingerprints if self.region.has_fingerprints else ()
        # Added to block_state.rewritten only if nothing differs: a rewrite that differs is an error, not a habit.
        self._rewritten: set[str] = set()
        self._position = -1
        self._settling = Settling()
        # The noise of the coarsest dtype so far. Everything that is computed after it has that noise.
        self._allowed = 0.0
        # For the first tensor whose metadata differ.
        self._error: RecomputeError | None = None
        self._differences: list[Difference] = []
        # What may explain these, once the recompute has ended.
        self._causes: list[str] = []
        weights = [] if self.block_state.writes is False else _weights(self.region)
        self._versions = {weight: weight._version for weight in weights if not weight.is_inference()}

    def add_metadata(self, forward: torch_private.Metadata, tensor: torch.Tensor) -> None:
        """Note a tensor whose metadata differ from those of the forward.

        A tensor that recompute makes may have another version: it may be written more or less often. A weight or a
        buffer may not, unless the block writes it itself. If the block does not, and values are compared, then the
        values decide: somebody may stream the weights of many blocks through one buffer.
        """
        recomputed = torch_private.metadata(tensor)
        if forward[:-1] != recomputed[:-1]:
            what = f"saves {_readable(*recomputed)} where the forward saved {_readable(*forward)}"
        else:
            # A Linear module saves a view of its weight. A view of a buffer counts by itself: the view may be a part
            # that was not written.
            written = tensor._base if isinstance(tensor._base, torch.nn.Parameter) else tensor
            names = {value: name for module in self.region.modules for name, value in _state_of(module)}
            if not (isinstance(written, torch.nn.Parameter) or written in names) or self._is_written(written):
                return
            name = names.get(written, f"a parameter {tuple(written.shape)}")
            what = f"uses other values of {name} than the forward did: it was written between forward and backward "
            what += "(optimizer.step, an EMA swap, load_state_dict), or another adapter is active"
            if written not in names and self._is_rewritten(tensor, what):
                return
        self._error = self._error or self._error_of(what)

    def _error_of(self, what: str) -> RecomputeError:
        return RecomputeError(
            f"recompute {what}.\n{causes.likely_causes(self.region)}Gradients would be wrong. Keep what a block reads "
            f"besides its arguments unchanged until backward is done (an adapter, a cache, random numbers); "
            f'determinism_check="none" switches off only this check.',
            describe(self.region.function),
        )

    def _is_rewritten(self, weight: torch.Tensor, what: str) -> bool:
        """Whether a weight was written with the values that it had, here or in a step that compared values.

        what: says that it was not. On an accelerator that shows later.
        """
        if not self.fingerprints:
            return "weights" in self.block_state.rewritten
        forward = self.fingerprints[self._position + 1]
        recomputed = fingerprint(weight)
        if forward is None or recomputed is None:
            return False
        if forward.is_read_later:
            error = self._error_of(what)
            self._differences.append(Difference(forward, recomputed, 0.0, lambda seen: error))
        elif relative_difference(forward, recomputed) > 0:
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
        """Compare the values of the next tensor that is saved. None: no autograd node needs this tensor any longer."""
        self._position += 1
        if tensor is not None:
            self._compare(self._settling.add(self._position, tensor))

    def _compare(self, settled: Iterable[Saved]) -> None:
        for position, tensor in settled:
            forward = self.fingerprints[position] if self._error is None else None
            recomputed = None if forward is None else fingerprint(tensor)
            if forward is None or recomputed is None:
                continue
            # Later tensors are computed from this one, in another dtype or not: its noise is in them.
            allowed = tolerance(forward.dtype)
            if allowed:
                allowed = self._allowed = max(self._allowed, allowed)
            if forward.is_read_later or relative_difference(forward, recomputed) > allowed:
                where = place(module_of(self.region.function), tensor, self.ends)
                if where is not None:
                    error = functools.partial(_error_of_values, describe(self.region.function), where, self._causes)
                    self._differences.append(Difference(forward, recomputed, allowed, error))

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the block has written a weight in this recompute."""
        return self._versions.get(tensor, tensor._version) != tensor._version

    def check(self) -> bool:
        """Raise RecomputeError if something differs; for values on an accelerator, at the end of this backward.

        Returns:
            Whether numbers are read then. If they are right, that ends the block's step.
        """
        if self.block_state.writes is None:
            self.block_state.writes = any(map(self._is_written, self._versions))
        self._compare(self._settling.end()[0])
        if self._error is not None:
            raise self._error
        if self._differences:
            self._causes.append(causes.likely_causes(self.region))
        _raise_first(difference for difference in self._differences if not difference.forward.is_read_later)
        differences = [difference for difference in self._differences if difference.forward.is_read_later]
        if differences or self.region.early:
            _check_at_end_of_backward(Unread(self.block_state, differences, self.region.early, self._rewritten))
            return True
        self.block_state.rewritten |= self._rewritten
        return False


class Unread(NamedTuple):
    """What one recompute found, as far as its numbers are on an accelerator."""

    block_state: BlockState
    differences: Sequence[Difference]
    early: Sequence[Pair]
    # What was written with the same values, if nothing differs.
    rewritten: set[str]

    @property
    def pairs(self) -> list[Pair]:
        """All numbers that are to be read."""
        return [*((difference.forward, difference.recomputed) for difference in self.differences), *self.early]

    def read(self, pairs: Sequence[Pair]) -> Unread:
        """The same, with `pairs` on the host."""
        count = len(self.differences)
        differences = [
            difference._replace(forward=forward, recomputed=recomputed)
            for difference, (forward, recomputed) in zip(self.differences, pairs[:count], strict=True)
        ]
        return self._replace(differences=differences, early=pairs[count:])

    def accept(self) -> None:
        """Nothing differs: the block's step may end."""
        self.block_state.rewritten |= self.rewritten
        self.block_state.recomputed = True


class _UnreadOfBackward:
    """What the recomputes of one backward found whose numbers are on an accelerator.

    Only the callback of that backward holds it. If the backward raises, it is dropped: a later backward would otherwise
    report differences that are not its own.
    """

    def __init__(self, backward: int) -> None:
        self.backward = backward
        self.regions: list[Unread] = []

    def check(self) -> None:
        """Read all numbers, and raise RecomputeError if some differ."""
        # A region that is recomputed from here on, by the callback of somebody else, has to be read on its own.
        process.unread_comparisons.pop(self.backward, None)
        read = iter(_read([fingerprint for region in self.regions for pair in region.pairs for fingerprint in pair]))
        regions = [region.read([(next(read), next(read)) for _ in region.pairs]) for region in self.regions]
        for region in regions:
            note_early(region.block_state, region.early)
        for region in regions:
            _raise_first(region.differences)
        for region in regions:
            region.accept()


def _check_at_end_of_backward(region: Unread) -> None:
    # -1: somebody reads a saved tensor outside a backward, or compiled autograd runs, which drops callbacks. Nothing
    # would read the numbers later, so they are read now.
    backward = -1 if torch_private.in_compiled_autograd() else torch_private.running_backward()
    unread = process.unread_comparisons.get(backward) or _UnreadOfBackward(backward)
    unread.regions.append(region)
    if backward == -1:
        unread.check()
    elif len(unread.regions) == 1:
        process.unread_comparisons[backward] = unread
        # An error skips the callbacks that come later, and DDP's forwards fail if its own is skipped. So this callback
        # only queues the check, which makes it the last.
        torch_private.at_end_of_backward(functools.partial(torch_private.at_end_of_backward, unread.check))


_FORMATS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}
"""Dtype of a number -> its letter in the formats of the module struct."""


def _read(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """The fingerprints with numbers on the host. Waits for the accelerator once: the bytes of all come together."""
    numbers = [number for fingerprint in fingerprints for number in (*fingerprint.sums, fingerprint.norm)]
    device = numbers[0].device
    with torch_private.without_modes():
        parts = [number.reshape(1).view(torch.uint8) for number in numbers]
        data = bytes(torch.cat([part if part.device == device else part.to(device) for part in parts]).tolist())
    values = iter(struct.unpack("=" + "".join(_FORMATS[number.dtype] for number in numbers), data))
    return [Fingerprint(each.dtype, [next(values) for _ in each.sums], next(values)) for each in fingerprints]


def _raise_first(differences: Iterable[Difference]) -> None:
    """Raise the error of the first tensor that differs by more than noise."""
    for forward, recomputed, allowed, error in differences:
        apart = relative_difference(forward, recomputed)
        if apart > allowed:
            raise error(
                f"relative difference {apart:.1e}, {allowed:.1e} is noise" if allowed else "whole numbers differ"
            )


def _error_of_values(block: str, where: str, found: Sequence[str], seen: str) -> RecomputeError:
    return RecomputeError(
        f"recompute does not compute what the forward did. The first difference is {where} ({seen}).\n"
        f"{found[0]}{'Or something' if found[0] else 'Something'} besides its arguments changed before backward: an "
        f"adapter or its scale, weights, a cache, a context variable, random numbers of another generator than the "
        f"default one, or a state that the block changes itself. Gradients would be wrong, and may have been before: "
        f"values are compared in steps 0, 1, 2, 4, 8, ...\nKeep it unchanged until backward is done (a LoRA's scale: "
        f'by set_adapters), or pass it to the block; determinism_check="none" switches off only this check.',
        block,
    )


def _weights(region: Region) -> list[torch.Tensor]:
    """The weights that a function may write: weights of modules, and weights that a wrapper around a block holds."""
    weights = itertools.chain(*(module.parameters() for module in region.modules))
    return [*weights, *tensors_in(held_by(region.function))]


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _readable(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device, _: int) -> str:
    return f"a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def place(module: torch.nn.Module | None, tensor: torch.Tensor, ends: types.CodeType) -> str | None:
    """In words: the op that computed a tensor that autograd is about to save, and the module in `module` that saves it.

    None for running statistics, or a copy of them: norms of batches and instances write them, and do not use them in
    backward.

    ends: code of the frame at which the search for the module ends. Reading the local variables of the frames beyond
    it would keep these variables alive.
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
"""Dtype that has fingerprints -> dtype of its sums. float8 and smaller are missing because torch adds them up only as
copies, and uint8 because it holds workspaces of kernels and packed weights."""


class Fingerprint(NamedTuple):
    """Numbers of one tensor. For a tensor on an accelerator they are tensors there, and nobody waits for them."""

    dtype: torch.dtype
    sums: list[Any]
    norm: Any  # 0 for integers

    @property
    def is_read_later(self) -> bool:
        """Whether its numbers are on an accelerator."""
        return isinstance(self.norm, torch.Tensor)


COMPARISON = "fastac::comparison"
"""Name of a fingerprint in the profile of fastac.verify, which does not count its time as recompute."""


def _named() -> contextlib.AbstractContextManager[Any]:
    return torch.profiler.record_function(COMPARISON) if process.replayed_calls else contextlib.nullcontext()


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None without plain values: a subclass, sparse, nested, empty, on "meta".

    None also for one or two integers: attention kernels save a seed, and leave it unset if they draw nothing.
    """
    wide = _WIDE.get(tensor.dtype)
    if wide is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() <= (2 if wide is torch.int64 else 0):
        return None
    if not tensor.untyped_storage().nbytes():  # somebody has freed it, as FSDP does
        return None
    # Modes of the user (a FLOP counter, a profiler of memory) must not see ops that are not the model's.
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
            numbers = [number.item() for number in numbers]
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


def relative_difference(forward: Fingerprint, recomputed: Fingerprint) -> float:
    """Difference of two fingerprints, relative to the norm: 0 if they are equal, infinite for unequal integers."""
    largest, scale = 0.0, max(float(forward.norm), float(recomputed.norm))
    for first, second in zip((*forward.sums, forward.norm), (*recomputed.sums, recomputed.norm), strict=True):
        # A batch with NaN in it is legal: recompute gives NaN in the same places.
        if first != second and not (math.isnan(first) and math.isnan(second)):
            apart = float(abs(first - second)) / scale if scale else math.inf
            largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest
