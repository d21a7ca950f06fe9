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
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fastac.engine import torch_private
from fastac.engine.blocks import BlockRecord, describe
from fastac.engine.comparison import Comparison, Fingerprint, Metadata, Writes, changed, fingerprint, metadata
from fastac.engine.generators import current_states, generator_state, set_states
from fastac.engine.offload import Stash, unpack_input, unpack_keywords
from fastac.engine.tape import RecomputeError, Replay, Tape
from fastac.errors import is_out_of_memory

_NOTHING = contextlib.nullcontext()
_MISTAKES = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a block raises whose state is not what it was; what is derived from these has a meaning of its own."""


class _Stop(Exception):  # noqa: N818 it ends a recompute that has all that is needed
    pass


class Slot:
    """Stands in an autograd node for a tensor that it saved."""

    __slots__ = ("__weakref__", "metadata")
    metadata: Metadata


class Region:
    """One call of a function under checkpointing. It lives as long as its autograd graph."""

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
        stash: Stash | None = None,
    ) -> None:
        self.function = function
        self.kwargs = kwargs
        self.record = record
        self.tape = tape
        self.stash = stash
        self.compares = compares
        self.early_stop = torch_private.early_stop(early_stop)
        self.complete = False
        self.slots: list[weakref.ref[Slot]] = []
        self.recomputed: dict[Any, dict[Slot, torch.Tensor]] = {}  # by backward: what it has not asked for yet
        self.fingerprints: list[Fingerprint | None] | None = [] if has_fingerprints else None
        # What the recompute is to find as the forward does.
        self.args = torch_private.save(args)
        self.generators = current_states((*args, *kwargs.values())) if preserve_rng_state else []
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

    def offload(self, args: Iterable[Any], stash: Stash) -> None:
        """Let a stash say where what is kept is from now on. args: as the forward was given them."""
        if self.tape is not None and stash.policy.offloads_outputs:
            for entry in self.tape.entries:
                entry.offload(stash)
        if stash.takes_inputs:
            torch_private.register_hooks(self.args, args, stash.keep_input, unpack_input)
            self.kwargs = {name: stash.keep_input(value) for name, value in self.kwargs.items()}
        stash.hold()

    @torch_private.as_checkpoint_hook
    def _checkpoint_hook(self, tensor: torch.Tensor) -> Slot:
        slot = Slot()
        slot.metadata = metadata(tensor)
        self.slots.append(weakref.ref(slot))
        if self.fingerprints is not None:
            self.fingerprints.append(fingerprint(tensor))
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
        tensors = recompute.tensors
        before = [(device, generator_state(device)) for device, _ in self.generators]
        try:
            kwargs = self.kwargs
            if self.stash is not None:
                self.stash.reload()
                kwargs = unpack_keywords(kwargs)
            args = torch_private.unpack(self.args)
            set_states(self.generators)
            with (
                contextlib.suppress(_Stop),
                saved_tensors_hooks(recompute._recomputation_hook, unchanged),
                torch.enable_grad(),
                self._as_in_forward(),
                _NOTHING if self.tape is None else Replay(self.tape),
            ):
                try:
                    self.function(*args, **kwargs)
                except _MISTAKES as error:
                    _name_cause(self.function, error)
                    raise
            self.record.recomputed = True
            recompute.writes.end()
            if self.complete or not recompute.surplus:  # else a gradient taken inside the forward: it ran beyond that
                recompute.check()
        finally:
            set_states(before)
            if self.stash is not None:
                self.stash.end_recompute()
            vars(recompute).clear()  # the graph that it made has its hook; a block that keeps a part of that is freed
        if backward != -1:  # else somebody reads one saved tensor of the graph
            self.recomputed[backward] = tensors
            if isinstance(backward, int):
                torch_private.at_end_of_backward(functools.partial(_forget, weakref.ref(self), backward))
        return tensors

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


def _name_cause(function: Any, error: Exception) -> None:
    """Raise RecomputeError for what a recompute raised; not for lack of memory, which a trainer may catch."""
    if type(error) in _MISTAKES and not is_out_of_memory(error):
        # of its type, too: torch's checkpoint raises the error itself
        raise type("RecomputeError", (RecomputeError, type(error)), {})(
            f"{describe(function)}: recompute raised {type(error).__name__} where the forward did not: {error}\n"
            f"It probably read state that changed in between: a cache, a list, a flag, a context that was left. Switch "
            f'caches off in training, or do not checkpoint the block (policy "none", blocks=... without it).'
        ) from error


class _Recompute:
    """Finds out what goes into the slots of a region. It does not hold the region, which what it makes may outlive."""

    def __init__(self, region: Region) -> None:
        self.function = region.function
        self.tensors: dict[Slot, torch.Tensor] = {}
        self.count = len(region.slots)
        self.slots = iter(region.slots)
        self.last = region.slots[-1] if region.early_stop else None
        self.surplus = 0  # tensors that the forward did not save
        self.compares = region.compares
        self.writes = Writes(self.function, region.record)
        self.error: RecomputeError | None = None  # for the first tensor that is not as in the forward
        self.comparison: Comparison | None = None
        if region.fingerprints is not None:
            self.comparison = Comparison(self.function, region.fingerprints, Region._recompute.__code__)

    @torch_private.as_checkpoint_hook
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
            if self.compares and slot.metadata != metadata(tensor) and self.error is None:
                self.error = changed(self.function, slot.metadata, tensor, self.writes)
        if self.comparison is not None and self.error is None:  # values of the same shape
            self.comparison.add(tensor, slot is not None)
        if reference is self.last:
            raise _Stop
        return kept

    def check(self) -> None:
        """Raise RecomputeError when the recompute was not what the forward was."""
        missing = sum(1 for _ in self.slots)
        if self.surplus or missing:
            raise RecomputeError(
                f"{describe(self.function)}: recompute saved {self.count - missing + self.surplus} tensors for "
                f"backward where the forward saved {self.count}: it took another path.\nAn adapter that was switched, "
                f"disabled or fused before backward does that, another flag, a cache. Keep them until it is done. "
                f"So does torch.func.jvp with gradients on: run it under torch.no_grad()."
            )
        if self.error is not None:
            raise self.error
        if self.comparison is not None:
            self.comparison.check()


def _forget(reference: weakref.ref[Region], backward: int) -> None:
    region = reference()
    if region is not None:
        region.recomputed.pop(backward, None)


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, as it is: what unpacks what was packed as a tensor."""
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
