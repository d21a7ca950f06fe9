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
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fastac.engine import causes, linear, torch_private
from fastac.engine.beginning import Beginning, Draws
from fastac.engine.blocks import BlockState, describe, state_of
from fastac.engine.fingerprints import Fingerprint, fingerprint
from fastac.engine.offload import Stash
from fastac.engine.process import process, thread
from fastac.engine.recompute import Recompute, Recomputed, Slot, Stop
from fastac.engine.tape import RecomputeError, Replay, Tape
from fastac.engine.torch_private import metadata_of_plain
from fastac.errors import FastacError, is_out_of_memory

_NOTHING = contextlib.nullcontext()
_MISTAKES = (AssertionError, AttributeError, IndexError, KeyError, NameError, RuntimeError, TypeError, ValueError)
"""Errors that a block raises in recompute if its state changed. Subclasses of these mean something else."""


RECOMPUTE = "fastac::recompute"
"""Name of a recompute in the profile of fastac.verify."""


@dataclasses.dataclass(eq=False, repr=False)
class Region:
    """One call of a function under checkpointing. It lives as long as its autograd graph.

    Args:
        beginning: what runs, and the state in which it begins.
        tape: of the forward; None under a policy that saves nothing.
        draws: sees whether the forward draws random numbers that recompute would not repeat; None if it may.
        compares_metadata: metadata of all tensors that recompute saves are compared with the forward's.
        compares_values: their values are compared, too.
        early_stop: recompute ends with the last tensor that backward needs.
        stash: of a region that offloads.
    """

    beginning: Beginning
    tape: Tape | None
    draws: Draws | None = None
    compares_metadata: bool = True
    compares_values: bool = False
    early_stop: bool = True
    stash: Stash | None = None

    def __post_init__(self) -> None:
        self.function = self.beginning.function
        self.measured = self.tape.measured if self.tape is not None else None
        self.early_stop = torch_private.early_stop(self.early_stop)
        # Whether the forward has ended. A gradient taken inside the forward recomputes it before that.
        self.complete = False
        self.slots: list[weakref.ref[Slot]] = []
        # Of the tensors that the forward saved, if values are compared.
        self.fingerprints: list[Fingerprint | None] = []
        # By backward: the tensors that it has not unpacked yet.
        self.recomputed: dict[Any, Recomputed] = {}
        # In a checkpoint of somebody else's around the region, its inputs are slots.
        self.in_checkpoint = torch_private.innermost_checkpoint() is not None

    def __repr__(self) -> str:
        state = "complete" if self.complete else "in its forward"
        return f"Region({describe(self.function)}, {len(self.slots)} saved tensors, {state}, {self.tape})"

    # dynamo would compile what the forward calls, and recompute runs that eagerly: they save other tensors.
    @torch_private.without_dynamo
    def forward(self, args: Iterable[Any], observer: AbstractContextManager[Any] | None = None) -> Any:
        """Call the function. For backward, autograd saves slots only. observer: is open while the function runs."""
        if self.tape is not None:
            self.tape.draws = self.draws
        hooks = saved_tensors_hooks(self._checkpoint_hook, self._unpack)
        with hooks, self.tape or _NOTHING, observer or _NOTHING:
            outputs = self.function(*args, **self.beginning.kwargs)
        self.complete = True
        draws, self.draws = self.draws, None  # it holds states of generators
        if draws is not None and draws.look():
            raise FastacError(
                f"{describe(self.function)}: draws random numbers (dropout?) under preserve_rng_state=False: recompute "
                f"would draw others, and gradients would be wrong.\nLeave preserve_rng_state at True, or switch "
                f'dropout off; determinism_check="none" switches off only this check.'
            )
        self.beginning.end_forward()
        return outputs

    def offload(self, args: Iterable[Any], stash: Stash) -> None:
        """Hand outputs and inputs to a stash, which may move them to the host. args: the arguments of the forward."""
        if self.tape is not None and stash.policy.offloads_outputs:
            for entry in self.tape.entries:
                entry.offload(stash)
        if stash.takes_inputs:
            self.beginning.offload(args, stash)
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
        if self.compares_values:
            self.fingerprints.append(fingerprint(tensor))
        return slot

    @torch_private.without_dynamo
    def _unpack(self, slot: Slot) -> torch.Tensor:
        """The hook that unpacks tensors in backward. The first slot of a backward recomputes the region."""
        backward = torch_private.graph_exec_group() or torch_private.running_backward()
        try:
            recomputed = self.recomputed.get(backward)
            if recomputed is None:
                recomputed = self._recompute(backward)
            if self.measured is not None:
                self.measured.sample(tensor for tensor, _ in recomputed.values())
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
            for module in self.beginning.modules:
                state_of(module).submodules = None  # they may have changed: the next region searches them
            raise
        return tensor

    def _recompute(self, backward: Any) -> Recomputed:
        """Run the function again for a backward, as its forward began. Returns the tensor of each slot."""
        checks = self.slots, self.fingerprints, self.compares_metadata, self.early_stop, Region._recompute.__code__
        recompute = Recompute(self.beginning, *checks)
        tensors, tape = recompute.tensors, self.tape
        if self.measured is not None:
            self.measured.begin_recompute()
        try:
            if self.stash is not None:
                recompute.reloaded = self.stash.reload()
            with self.beginning.restored() as (args, kwargs, recompute.buffers):
                if self.complete:  # before that, a write may be the function's own
                    recompute.check_inputs()
                thread.choices.clear()
                with (
                    contextlib.suppress(Stop),
                    torch.profiler.record_function(RECOMPUTE) if process.replayed_calls else _NOTHING,
                    saved_tensors_hooks(recompute._recomputation_hook, unchanged),
                    torch.enable_grad(),
                    _NOTHING if tape is None else Replay(tape, functools.partial(causes.explain, self.beginning)),
                    linear.attached(self.beginning.modules[0], tape.policy) if tape and tape.products else _NOTHING,
                ):
                    try:
                        self.function(*args, **kwargs)
                    except _MISTAKES as error:
                        self._name_cause(error, (*args, *kwargs.values()))
                        raise
                # If a gradient was taken in the middle of the forward, this recompute ran further than the forward.
                is_read_later = (self.complete or recompute.position <= recompute.count) and recompute.check()
            if self.measured is not None:
                weights = [weight for module in self.beginning.modules for weight in module.parameters()]
                self.measured.end_recompute([tensor for tensor, _ in tensors.values()], weights)
        finally:
            # The graph of the recompute holds its hook, and a block may keep a part of that graph.
            vars(recompute).clear()
        if backward != -1:  # else a saved tensor is read outside a backward
            self.recomputed[backward] = tensors
        ended = None if is_read_later else self.beginning.state
        if isinstance(backward, int) and backward != -1 and not torch_private.in_compiled_autograd():
            torch_private.at_end_of_backward(functools.partial(_end, weakref.ref(self), backward, ended))
        elif ended is not None:
            ended.recomputed = True
        return tensors

    def _name_cause(self, error: Exception, inputs: Iterable[Any]) -> None:
        """Raise RecomputeError for an error in recompute. Not for a lack of memory: a trainer may catch that error."""
        if type(error) not in _MISTAKES or is_out_of_memory(error):
            return
        found = causes.explain(self.beginning)
        guess = "The block probably read state that changed in between: a cache, a list, a flag, random numbers, a "
        guess += "context that was left. Switch caches off in training, or do not"
        if any(map(torch_private.is_batched, inputs)):
            guess = "Its forward ran inside torch.vmap, which has ended: give the block a batch instead, or do not"
        said, *_ = str(error).split("\n")
        # Code that expects the block's error, as torch's checkpoint raises it, must catch this one as well.
        raise type("RecomputeError", (RecomputeError, type(error)), {})(
            f"recompute raised {type(error).__name__} where the forward did not: {said}\n"
            f'{found}{guess} checkpoint the block (policy "none", blocks=... without it).'
        ) from error


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
