"""A region: one call of a block under checkpointing, from its forward to its recomputes.

The mechanism is that of torch.utils.checkpoint with use_reentrant=False, and exact where that is. In the forward,
saved-tensor hooks put a `Slot` in the place of each tensor that autograd would save. The first slot that a backward
asks for runs the function again, under hooks that note what belongs into each slot, in the order in which they were
made. Nested regions need no rule: the arguments of the inner one are saved by autograd, and so are slots of the outer.

A slot is held by the autograd node that it was made for: of a node that is gone nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fastac.engine import fingerprints, generators, torch_private
from fastac.engine.blocks import BlockRecord, describe, module_of
from fastac.engine.fingerprints import Difference, Fingerprint
from fastac.engine.generators import set_generator_state
from fastac.engine.tape import RecomputeError, Replay, Tape

_NOTHING = contextlib.nullcontext()
_metadata = operator.attrgetter("shape", "dtype", "device", "_version")


class _Stop(Exception):  # noqa: N818 it ends a recompute that has all that is needed
    pass


class Slot:
    """Stands in an autograd node for a tensor that it saved."""

    __slots__ = ("__weakref__", "metadata")
    metadata: tuple[Any, ...]


class Region:
    """One call of a function under checkpointing. It lives as long as its autograd graph."""

    __slots__ = (
        "__weakref__",
        "args",
        "autocast",
        "compares",
        "complete",
        "default_device",
        "early_stop",
        "fingerprints",
        "function",
        "generators",
        "kwargs",
        "recomputed",
        "record",
        "slots",
        "tape",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: BlockRecord,
        tape: Tape | None,
        *,
        preserve_rng_state: bool = True,
        compares: bool = True,
        early_stop: bool = True,
        has_fingerprints: bool = False,
    ) -> None:
        self.function = function
        self.kwargs = kwargs
        self.record = record
        self.tape = tape
        self.compares = compares
        self.early_stop = torch_private.early_stop(early_stop)
        self.complete = False
        self.slots: list[weakref.ref[Slot]] = []
        self.recomputed: dict[Any, dict[Slot, torch.Tensor]] = {}  # by backward: what it has not asked for yet
        self.fingerprints: list[Fingerprint | None] | None = [] if has_fingerprints else None
        # What the recompute is to find as the forward does.
        self.args = torch_private.save(args)
        self.generators = generators.current_states((*args, *kwargs.values())) if preserve_rng_state else []
        self.autocast = _autocast()
        self.default_device = torch_private.default_device()

    @torch_private.without_dynamo
    def forward(self, args: Iterable[Any], observer: AbstractContextManager[Any] | None = None) -> Any:
        """Call the function, and drop what autograd would save. observer: is open while the function runs."""
        with saved_tensors_hooks(self._checkpoint_hook, self._unpack):
            if self.tape is None:
                outputs = self.function(*args, **self.kwargs)
            else:
                with self.tape, observer or _NOTHING:
                    outputs = self.function(*args, **self.kwargs)
        self.complete = True
        return outputs

    @torch_private.as_checkpoint_hook
    def _checkpoint_hook(self, tensor: torch.Tensor) -> Slot:
        slot = Slot()
        slot.metadata = _metadata(tensor)
        self.slots.append(weakref.ref(slot))
        if self.fingerprints is not None:
            self.fingerprints.append(fingerprints.fingerprint(tensor))
        return slot

    @torch_private.without_dynamo
    def _unpack(self, slot: Slot) -> torch.Tensor:
        backward = torch_private.backward_key()
        recomputed = self.recomputed.get(backward)
        if recomputed is None:
            recomputed = self._recompute(backward)
        try:
            return recomputed.pop(slot)
        except KeyError:
            raise RecomputeError(
                f"{describe(self.function)}: a saved tensor was asked for twice in one backward. Read "
                f"ctx.saved_tensors once in the backward of an autograd.Function; backwards that overlap cannot share "
                f"a GraphExecGroup."
            ) from None

    def _recompute(self, backward: Any) -> dict[Slot, torch.Tensor]:
        """Run the function again for a backward. Returns what goes into the slots."""
        recompute = _Recompute(self)
        args = torch_private.unpack(self.args)
        before = [(device, generators.generator_state(device)) for device, _ in self.generators]
        try:
            with saved_tensors_hooks(recompute._recomputation_hook, _unchanged), torch.enable_grad():
                for device, state in self.generators:
                    set_generator_state(state, device)
                with self._as_in_forward(), _NOTHING if self.tape is None else Replay(self.tape):
                    self.function(*args, **self.kwargs)
        except _Stop:
            pass
        finally:
            for device, state in before:
                set_generator_state(state, device)
        self.record.recomputed = True
        recompute.check(self)
        if backward != -1:  # else somebody reads one saved tensor of the graph
            self.recomputed[backward] = recompute.tensors
            if isinstance(backward, int):
                torch_private.at_end_of_backward(functools.partial(_forget, weakref.ref(self), backward))
        return recompute.tensors

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        """Autocast and the default device as the forward had them."""
        device = self.default_device
        if self.autocast == _autocast() and device == torch_private.default_device():
            return _NOTHING
        stack = contextlib.ExitStack()
        on = {kind: (dtype, caches) for kind, dtype, caches in self.autocast}
        for kind in _kinds_of_autocast():
            dtype, caches = on.get(kind, (None, None))
            stack.enter_context(torch.amp.autocast(kind, dtype, kind in on, caches))
        if device is not None:
            stack.enter_context(device)
        return stack


class _Recompute:
    """Finds out what goes into the slots of a region. It does not hold the region, which what it makes may outlive."""

    __slots__ = (
        "again",
        "allowed",
        "compares",
        "differences",
        "function",
        "last",
        "slots",
        "surplus",
        "tensors",
        "wrong",
    )

    def __init__(self, region: Region) -> None:
        self.tensors: dict[Slot, torch.Tensor] = {}
        self.slots = iter(region.slots)
        self.last = region.slots[-1] if region.early_stop else None
        self.compares = region.compares
        self.surplus = 0  # tensors that the forward did not save
        self.wrong = ""  # the first tensor that is not as in the forward, in words
        self.function = region.function
        self.again = None if region.fingerprints is None else iter(region.fingerprints)
        self.differences: list[Difference] = []
        self.allowed = 0.0  # the noise of the coarsest type so far, which is in all that follows

    def _recomputation_hook(self, tensor: torch.Tensor) -> torch.Tensor:
        # Without its graph, which would hold whatever else it saved. The recompute's own graph may be used inside it.
        kept = tensor.data if tensor.requires_grad else tensor
        reference = next(self.slots, None)
        if reference is None:
            self.surplus += 1
            return kept
        slot = reference()
        if slot is not None:
            self.tensors[slot] = kept
            if self.compares and slot.metadata != _metadata(tensor) and not self.wrong:
                self._find_wrong(slot.metadata, tensor)
        if self.again is not None:
            forward = next(self.again)
            if slot is not None and forward is not None:
                self._compare(forward, tensor)
        if reference is self.last:
            raise _Stop
        return kept

    def _find_wrong(self, forward: tuple[Any, ...], tensor: torch.Tensor) -> None:
        again = _metadata(tensor)
        if forward[:-1] != again[:-1]:
            self.wrong = f"saves {_readable(again)} where the forward saved {_readable(forward)}"
            return
        written = tensor if tensor._base is None else tensor._base  # a Linear module saves a view of its weight
        if isinstance(written, torch.nn.Parameter):  # what is made anew may well be written more or less often
            module = module_of(self.function)
            names = () if module is None else module.named_parameters()
            name = next((name for name, one in names if one is written), f"a parameter {tuple(written.shape)}")
            self.wrong = (
                f"uses {name} otherwise than the forward did: it was written between forward and backward, or another "
                f"adapter is active"
            )

    def _compare(self, forward: Fingerprint, tensor: torch.Tensor) -> None:
        again = fingerprints.fingerprint(tensor)
        if again is None:
            return
        allowed = fingerprints.tolerance(forward.dtype)
        if allowed:
            allowed = self.allowed = max(self.allowed, allowed)
        if fingerprints.may_differ(forward, again, allowed):
            where = fingerprints.place(module_of(self.function), tensor, Region._recompute.__code__)
            if where is not None:
                self.differences.append(Difference(forward, again, allowed, where))

    def check(self, region: Region) -> None:
        """Raise RecomputeError when the recompute was not what the forward was."""
        if self.surplus and not region.complete:
            return  # a gradient taken inside the forward: the recompute ran beyond it
        missing = sum(1 for _ in self.slots)
        if self.surplus or missing:
            count = len(region.slots)
            raise RecomputeError(
                f"{describe(self.function)}: recompute saved {count - missing + self.surplus} tensors for backward "
                f"where the forward saved {count}: the function took another path. Make it depend on its arguments "
                f"alone."
            )
        if self.wrong:
            raise RecomputeError(
                f"{describe(self.function)}: recompute {self.wrong}.\nMake it depend on its arguments alone, and leave "
                f'weights as they are until backward is done; determinism_check="none" switches this check off.'
            )
        if self.differences:
            fingerprints.report(describe(self.function), self.differences)


def _readable(metadata: tuple[Any, ...]) -> str:
    shape, dtype, device, _ = metadata
    return f"a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _forget(reference: weakref.ref[Region], backward: int) -> None:
    region = reference()
    if region is not None:
        region.recomputed.pop(backward, None)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _autocast() -> list[tuple[str, torch.dtype, bool]]:
    """Where autocast is on, of the CPU and the accelerator: the kind, the type it casts to, and whether it caches."""
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _kinds_of_autocast()
        if torch.is_autocast_enabled(kind)
    ]


@functools.cache
def _kinds_of_autocast() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
