"""A region: one call of a block under checkpointing, from its forward to its recomputes.

The mechanism is that of torch.utils.checkpoint with use_reentrant=False, and it is exact where torch's is. In the
forward, saved-tensor hooks replace each tensor that autograd would save by a `Slot`. When backward unpacks the first
slot, the region runs the function again. Hooks then assign the tensors that autograd saves to the slots, in order.
Nested regions need no rule: autograd saves the arguments of the inner region, so they are slots of the outer one.

An autograd node holds its slots, and the region refers to them weakly: no tensor is held for a node that is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fastac.engine import causes, linear, torch_private
from fastac.engine.blocks import BlockState, describe, state_of
from fastac.engine.comparison import Comparison, Fingerprint, Pair, Saved, Settling, fingerprint, note_early
from fastac.engine.generators import (
    Draws,
    current_states,
    generator_state,
    python_states,
    set_python_states,
    set_states,
    tensors_in,
)
from fastac.engine.module_state import Snapshot, in_place_of
from fastac.engine.offload import Stash, unpack_input, unpack_keywords
from fastac.engine.process import process, thread
from fastac.engine.tape import RecomputeError, Replay, Tape
from fastac.engine.torch_private import metadata_of_plain
from fastac.errors import FastacError, is_out_of_memory

_NOTHING = contextlib.nullcontext()
_MISTAKES = (AssertionError, AttributeError, IndexError, KeyError, NameError, RuntimeError, TypeError, ValueError)
"""Errors that a block raises in recompute if its state changed. Subclasses of these mean something else."""


RECOMPUTE = "fastac::recompute"
"""Name of a recompute in the profile of fastac.verify."""


class _Stop(Exception):  # noqa: N818 not an error
    """Ends a recompute early: backward has all tensors that it needs."""


class Slot:
    """Replaces a tensor that an autograd node saves. It has the tensor's metadata, and no data."""

    __slots__ = ("__weakref__", "metadata")
    metadata: torch_private.Metadata


Recomputed = dict[Slot, tuple[torch.Tensor, int]]
"""The tensor that recompute made for each slot, with its version at that time."""


@dataclasses.dataclass(eq=False, repr=False)
class Region:
    """One call of a function under checkpointing. It lives as long as its autograd graph.

    Args:
        function: what runs, with args and kwargs. The region saves args as autograd would.
        modules: the block, or the modules that the function may run.
        block_state: what is known of the block.
        tape: of the forward; None under a policy that saves nothing.
        preserve_rng_state: recompute draws the random numbers that the forward drew.
        compares_metadata: metadata of all tensors that recompute saves are compared with the forward's.
        compares_values: their values are compared, too.
        early_stop: recompute ends with the last tensor that backward needs.
        stash: of a region that offloads.
        snapshot: the state of the modules as the forward begins; None without modules.
        mode: makes a context for recompute: a dispatch mode, if the forward ran under one.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    modules: Sequence[torch.nn.Module]
    block_state: BlockState
    tape: Tape | None
    _: dataclasses.KW_ONLY
    preserve_rng_state: bool = True
    compares_metadata: bool = True
    compares_values: bool = False
    early_stop: bool = True
    stash: Stash | None = None
    snapshot: Snapshot | None = None
    mode: Callable[[], AbstractContextManager[Any]] | None = None

    def __post_init__(self) -> None:
        self.early_stop = torch_private.early_stop(self.early_stop)
        self.has_fingerprints = self.compares_values and self.compares_metadata and self.preserve_rng_state
        # Whether the forward has ended. A gradient taken inside the forward recomputes it before that.
        self.complete = False
        self.slots: list[weakref.ref[Slot]] = []
        # Of the tensors that the forward saved, if values are compared.
        self.fingerprints: list[Fingerprint | None] = []
        self.settling = Settling(tells_early=True) if self.compares_values else None
        # Numbers on an accelerator that tell, once they are read, whether the function writes what it saved last.
        self.early: list[Pair] = []
        # By backward: the tensors that it has not unpacked yet.
        self.recomputed: dict[Any, Recomputed] = {}
        # What follows is the state in which the forward begins, and recompute again.
        self.generators = current_states((*self.args, *self.kwargs.values())) if self.preserve_rng_state else []
        # The states of Python's and numpy's generators take long to read. They are read in steps that compare values,
        # and in every step of a block that drew from them in one of these.
        reads = self.preserve_rng_state and (self.compares_values or self.block_state.draws)
        self.drawn = python_states() if reads else b""
        self.versions = _versions(self.args, self.kwargs)
        # From here on the arguments are not tensors any more: what reads them stands above.
        self.args = torch_private.save(self.args)
        # In a checkpoint of somebody else's around the region, its inputs are slots.
        self.in_checkpoint = torch_private.innermost_checkpoint() is not None
        self.autocast = autocast_state()
        self.default_device = torch_private.default_device()
        # What follows is for messages: the user's contexts, which recompute does not enter again.
        self.settings = self.settings_now = causes.settings() if self.compares_values else {}
        self.user_hooks = torch_private.saved_tensors_hooks() if self.compares_values else None

    def __repr__(self) -> str:
        state = "complete" if self.complete else "in its forward"
        return f"Region({describe(self.function)}, {len(self.slots)} saved tensors, {state}, {self.tape})"

    # dynamo would compile what the forward calls, and recompute runs that eagerly: they save other tensors.
    @torch_private.without_dynamo
    def forward(self, args: Iterable[Any], observer: AbstractContextManager[Any] | None = None) -> Any:
        """Call the function. For backward, autograd saves slots only. observer: is open while the function runs."""
        draws = None
        if self.compares_values and self.compares_metadata and not self.preserve_rng_state:
            draws = Draws((*args, *self.kwargs.values()))
        with saved_tensors_hooks(self._checkpoint_hook, self._unpack):
            if self.tape is None:
                outputs = self.function(*args, **self.kwargs)
            else:
                self.tape.draws = draws
                with self.tape, observer or _NOTHING:
                    outputs = self.function(*args, **self.kwargs)
        self.complete = True
        if draws is not None and draws.look():
            raise FastacError(
                f"{describe(self.function)}: draws random numbers (dropout?) under preserve_rng_state=False: recompute "
                f"would draw others, and gradients would be wrong.\nLeave preserve_rng_state at True, or switch "
                f'dropout off; determinism_check="none" switches off only this check.'
            )
        self._note_state()
        return outputs

    def _note_state(self) -> None:
        """The forward has ended: note which state the function changed."""
        state = self.block_state
        if self.drawn and not state.draws:
            state.draws = self.drawn != python_states()
            self.drawn = self.drawn if state.draws else b""
        if self.settling is not None:
            settled, pairs = self.settling.end()
            self._take_fingerprints(settled)
            self.early = note_early(state, pairs)
            self.settling = None
        if self.snapshot is not None:
            self.snapshot.end_forward(self.function, self.modules)
        # Inputs that the function writes itself, such as a cache, are written by recompute as well.
        self.versions = [(tensor, version) for tensor, version in self.versions if not _was_written(tensor, version)]

    def offload(self, args: Iterable[Any], stash: Stash) -> None:
        """Hand outputs and inputs to a stash, which may move them to the host. args: the arguments of the forward."""
        if self.tape is not None and stash.policy.offloads_outputs:
            for entry in self.tape.entries:
                entry.offload(stash)
        if stash.takes_inputs:
            torch_private.register_hooks(self.args, args, stash.take_input, unpack_input)
            self.kwargs = {name: stash.take_input(value) for name, value in self.kwargs.items()}
        stash.end_forward()

    @torch_private.as_checkpoint_hook
    def _checkpoint_hook(self, tensor: torch.Tensor) -> Slot:
        # Do not rename: torch_private.innermost_checkpoint knows a checkpoint's hook by this name, which is torch's.
        slot = Slot()
        try:
            slot.metadata = metadata_of_plain(tensor)
        except RuntimeError:  # a strided nested tensor has no shape
            slot.metadata = torch_private.metadata(tensor)
        self.slots.append(weakref.ref(slot))
        if self.settling is not None:
            self.fingerprints.append(None)
            self._take_fingerprints(self.settling.add(len(self.fingerprints) - 1, tensor))
        return slot

    def _take_fingerprints(self, settled: Iterable[Saved]) -> None:
        for position, tensor in settled if self.has_fingerprints else ():
            self.fingerprints[position] = fingerprint(tensor)

    @torch_private.without_dynamo
    def _unpack(self, slot: Slot) -> torch.Tensor:
        """The hook that unpacks tensors in backward. The first slot of a backward recomputes the region."""
        backward = torch_private.backward_key()
        try:
            recomputed = self.recomputed.get(backward)
            if recomputed is None:
                recomputed = self._recompute(backward)
            # A tensor goes with the node that reads it, and not at the end of the backward: that keeps the peak low.
            tensor, version = recomputed.pop(slot, (None, 0))
            if tensor is None:
                raise RecomputeError(
                    "a saved tensor was already unpacked once in this backward. Read ctx.saved_tensors once in the "
                    "backward of an autograd.Function. Backwards that overlap cannot share a GraphExecGroup."
                )
            # The backward of another node may have written into it, as autograd itself would notice.
            if tensor._version != version:
                raise RecomputeError(
                    f"a tensor {tuple(tensor.shape)} needed for gradients was written in place after it was saved: it "
                    f"is at version {tensor._version}, and was saved at version {version}.\nA backward that writes "
                    f"into ctx.saved_tensors does that, or the block itself. Without checkpointing torch raises there "
                    f"(modified by an inplace operation). Write into a copy."
                )
        except FastacError as error:
            # Of nested regions, the innermost names itself first.
            error.block = error.block or describe(self.function)
            for module in self.modules:
                state_of(module).submodules = None  # they may have changed: the next region searches them
            raise
        return tensor

    def _recompute(self, backward: Any) -> Recomputed:
        """Run the function again for a backward, on its modules as they were. Returns the tensor of each slot."""
        with _NOTHING if self.snapshot is None else self.snapshot.restored() as buffers:
            return self._run_again(backward, buffers)

    def _run_again(self, backward: Any, buffers: Mapping[int, torch.Tensor] | None) -> Recomputed:
        """Run the function again, in the state in which its forward began. buffers: `id` of a copy -> buffer."""
        recompute = _Recompute(self, buffers)
        tensors = recompute.tensors
        # The generators are put back by hand: a context would have to unwind at each early stop, which takes time.
        before = [(device, generator_state(device)) for device, _ in self.generators]
        of_python = python_states() if self.drawn else b""
        try:
            kwargs = self.kwargs
            if self.stash is not None:
                recompute.reloaded = self.stash.reload()
                kwargs = unpack_keywords(kwargs)
            args = torch_private.unpack(self.args)
            self._check_inputs(recompute.comparison)
            # Not when an error is made: the block may open contexts of its own.
            self.settings_now = causes.settings() if self.compares_values else {}
            thread.choices.clear()
            set_states(self.generators)
            if self.drawn:
                set_python_states(self.drawn)
            with (
                contextlib.suppress(_Stop),
                torch.profiler.record_function(RECOMPUTE) if process.replayed_calls else _NOTHING,
                saved_tensors_hooks(recompute._recomputation_hook, unchanged),
                torch.enable_grad(),
                self._as_in_forward(),
                Replay(self.tape, functools.partial(causes.likely_causes, self)) if self.tape is not None else _NOTHING,
                linear.attached(self.modules[0], self.tape.policy) if self.tape and self.tape.products else _NOTHING,
                _NOTHING if self.mode is None else self.mode(),
            ):
                try:
                    self.function(*args, **kwargs)
                except _MISTAKES as error:
                    self._name_cause(error, (*args, *kwargs.values()))
                    raise
            # Otherwise a gradient was taken in the middle of the forward, and this recompute ran further than the
            # forward had come.
            is_read_later = (self.complete or not recompute.surplus) and recompute.check()
        finally:
            set_states(before)
            if of_python:
                set_python_states(of_python)
            # The graph of the recompute holds its hook, and a block may keep a part of that graph.
            vars(recompute).clear()
        if backward != -1:  # else a saved tensor is read outside a backward
            self.recomputed[backward] = tensors
        ended = None if is_read_later else self.block_state
        if isinstance(backward, int) and backward != -1 and not torch_private.in_compiled_autograd():
            torch_private.at_end_of_backward(functools.partial(_end, weakref.ref(self), backward, ended))
        elif ended is not None:
            ended.recomputed = True
        return tensors

    def _name_cause(self, error: Exception, inputs: Iterable[Any]) -> None:
        """Raise RecomputeError for an error in recompute. Not for a lack of memory: a trainer may catch that error."""
        if type(error) not in _MISTAKES or is_out_of_memory(error):
            return
        guess = "The block probably read state that changed in between: a cache, a list, a flag, random numbers, a "
        guess += "context that was left. Switch caches off in training, or do not"
        if any(map(torch_private.is_batched, inputs)):
            guess = "Its forward ran inside torch.vmap, which has ended: give the block a batch instead, or do not"
        said, *_ = str(error).split("\n")
        # Code that expects the block's error, as torch's checkpoint raises it, must catch this one as well.
        raise type("RecomputeError", (RecomputeError, type(error)), {})(
            f"recompute raised {type(error).__name__} where the forward did not: {said}\n"
            f'{causes.likely_causes(self)}{guess} checkpoint the block (policy "none", blocks=... without it).'
        ) from error

    def _check_inputs(self, comparison: Comparison) -> None:
        """Raise RecomputeError for an input that was written since the forward, unless its value is compared."""
        # Before the forward has ended, a write may be the function's own. Those are left out when it ends.
        compares = self.compares_metadata and self.complete
        if compares and any(itertools.starmap(_was_written, self.versions)) and not comparison.inputs_are_rewritten():
            raise RecomputeError(
                "a tensor given by keyword, or inside a tuple, list or dict, was written in place between forward and "
                "backward.\nRecompute would read what it holds now, and gradients would be wrong. Write into a copy, "
                'or after backward; determinism_check="none" switches off only this check.'
            )

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        """A context with the forward's autocast and default device."""
        device = self.default_device
        # Most recomputes find the forward's state, and to enter contexts takes time in every one of them.
        if self.autocast == autocast_state() and device == torch_private.default_device():
            return _NOTHING
        stack = contextlib.ExitStack()
        # Backward may run under another autocast than the forward, so it is first switched off for every device.
        for device_type in _autocast_device_types():
            stack.enter_context(torch.amp.autocast(device_type, enabled=False))
        for device_type, dtype, caches in self.autocast:
            stack.enter_context(torch.amp.autocast(device_type, dtype, cache_enabled=caches))
        if device is not None:
            stack.enter_context(device)
        return stack


class _Recompute:
    """Finds the tensor of each slot of a region.

    It is emptied in the end: the graph of the recompute holds its hook, and may outlive the region.
    """

    def __init__(self, region: Region, buffers: Mapping[int, torch.Tensor] | None) -> None:
        self.buffers = buffers
        self.tensors: Recomputed = {}
        # Storages that offload brought back to the device for this recompute.
        self.reloaded: object = None
        self.count = len(region.slots)
        self.slots = iter(region.slots)
        # With the tensor of this slot, recompute ends.
        stops = region.early_stop and not (region.block_state.saves_early or region.early)
        self.last = region.slots[-1] if stops else None
        # Number of tensors that the forward did not save.
        self.surplus = 0
        self.compares_metadata, self.has_fingerprints = region.compares_metadata, region.has_fingerprints
        self.comparison = Comparison(region, Region._run_again.__code__)

    @torch_private.as_checkpoint_hook
    def _recomputation_hook(self, tensor: torch.Tensor) -> torch.Tensor:
        # Do not rename: torch_private.in_recompute knows a recompute by this name, which is torch's.
        # What is held has no graph, which would hold whatever else it saved. Unlike `data`, `detach` keeps the version
        # of the tensor. A gradient that is taken inside the function uses the tensor.
        detached = tensor.detach() if tensor.requires_grad else tensor
        reference = next(self.slots, None)
        if reference is None:
            self.surplus += 1
            return detached
        slot = reference()
        # Without a slot, the node that held it is gone, and nobody will ask for the tensor.
        if slot is not None:
            try:
                now = metadata_of_plain(tensor)
            except RuntimeError:
                now = torch_private.metadata(tensor)
            self.tensors[slot] = detached, now[-1]
            differs = slot.metadata != now
            if self.buffers and (kept := in_place_of(tensor, self.buffers)) is not tensor:
                self.tensors[slot] = kept.detach(), now[-1]
                differs = differs or kept._version != now[-1]
            if differs and self.compares_metadata:
                self.comparison.add_metadata(slot.metadata, tensor)
        if self.has_fingerprints:
            self.comparison.add_values(tensor if slot is not None else None)
        if reference is self.last:
            raise _Stop
        return detached

    def check(self) -> bool:
        """Raise RecomputeError when the recompute differed from the forward. Returns what Comparison.check does."""
        missing = sum(1 for _ in self.slots)
        if self.surplus or missing:
            raise RecomputeError(
                f"recompute saved {self.count - missing + self.surplus} tensors for backward where the forward saved "
                f"{self.count}: it took another path.\n{causes.likely_causes(self.comparison.region)}An adapter that "
                f"was switched, disabled or fused before backward does that, another flag, a cache, random numbers, "
                f"other settings of the compiler. Keep them until it is done. So does torch.func.jvp with gradients "
                f"on: run it under torch.no_grad()."
            )
        return self.comparison.check()


def _versions(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[tuple[weakref.ref[torch.Tensor], int]]:
    """The tensors given by keyword or inside containers, with their versions. autograd guards the positional ones."""
    values = [value for value in args if not isinstance(value, torch.Tensor)]
    values += kwargs.values()
    # Inference tensors have no version: to read it raises.
    return [(weakref.ref(tensor), tensor._version) for tensor in tensors_in(values) if not tensor.is_inference()]


def _was_written(reference: weakref.ref[torch.Tensor], version: int) -> bool:
    tensor = reference()  # None if somebody replaced it, or if it is on the host
    return tensor is not None and tensor._version != version


def _end(reference: weakref.ref[Region], backward: int, ended: BlockState | None) -> None:
    """A backward has ended without an error. ended: the state of a block whose step that ends."""
    region = reference()
    if region is not None:
        region.recomputed.pop(backward, None)
    if ended is not None:
        ended.recomputed = True


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: the hook that unpacks a tensor that was packed as it is."""
    return tensor


def autocast_state() -> list[tuple[str, torch.dtype, bool]]:
    """The device types for which autocast is on; its dtype, and whether it caches."""
    return [
        (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
        for device_type in _autocast_device_types()
        if torch.is_autocast_enabled(device_type)
    ]


@functools.cache
def _autocast_device_types() -> list[str]:
    """The CPU and the accelerator, if autocast knows them."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device_type for device_type in device_types if torch.amp.is_autocast_available(device_type)]
