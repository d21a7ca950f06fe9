"""One recompute of a region: it finds the tensor of each slot, and compares it with the one that the forward saved.

Checkpointing assumes that a block computes the same again. If something that it reads besides its arguments changes
before backward (an adapter, its scale, a cache, a context variable), shapes agree and gradients are wrong. So metadata
of all saved tensors are compared in every step, and their values in some, by `fingerprints`. A difference is raised in
the backward that recomputes: on a CPU at once, on an accelerator at its end, when the numbers of all of its recomputes
are read together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine import causes, torch_private
from fastac.engine.beginning import Beginning, tensors_in
from fastac.engine.blocks import BlockState, describe, held_by, module_of
from fastac.engine.fingerprints import Fingerprint, fingerprint, read, relative_difference, tolerance
from fastac.engine.module_state import in_place_of
from fastac.engine.process import process
from fastac.engine.tape import RecomputeError
from fastac.engine.torch_private import metadata_of_plain
from fastac.errors import class_name


class Slot:
    """Replaces a tensor that an autograd node saves. It has the tensor's metadata, and no data."""

    __slots__ = ("__weakref__", "metadata")
    metadata: torch_private.Metadata


Recomputed = dict[Slot, tuple[torch.Tensor, int]]
"""The tensor that recompute made for each slot, with its version at that time."""


class Stop(Exception):  # noqa: N818 not an error
    """Ends a recompute early: backward has all tensors that it needs."""


class Recompute:
    """Receives the tensors that autograd saves while a function runs again.

    It is emptied in the end: the graph of the recompute holds its hook, and may outlive the region.

    Args:
        beginning: what the function begins with.
        slots: what the forward saved, in order.
        fingerprints: of these tensors, if values are compared; else empty.
        compares_metadata: compare their metadata.
        early_stop: end with the last of them.
        runs: code of the frame that calls the function.
    """

    def __init__(
        self,
        beginning: Beginning,
        slots: Sequence[weakref.ref[Slot]],
        fingerprints: Sequence[Fingerprint | None],
        compares_metadata: bool,
        early_stop: bool,
        runs: types.CodeType,
    ) -> None:
        self.beginning, self.slots, self.fingerprints = beginning, slots, fingerprints
        self.compares_metadata, self.runs = compares_metadata, runs
        self.count = len(slots)
        # Position of the tensor that ends the recompute.
        self.last = self.count - 1 if early_stop else -1
        # Number of tensors that were saved so far.
        self.position = 0
        self.tensors: Recomputed = {}
        self.buffers: Mapping[int, torch.Tensor] = {}
        # Storages that offload brought back to the device for this recompute.
        self.reloaded: object = None
        # The first metadata that differ, in words.
        self.difference = ""
        self.findings = Findings(beginning.state)
        # The noise of the coarsest dtype so far. Everything that is computed after it has that noise.
        self.allowed = 0.0
        # Version of each weight that the function may write: of modules, and of a wrapper around a block.
        weights: list[torch.Tensor] = []
        if beginning.state.writes is not False:
            weights += itertools.chain(*(module.parameters() for module in beginning.modules))
            weights += tensors_in(held_by(beginning.function))
        self.versions = {weight: weight._version for weight in weights if not weight.is_inference()}

    @torch_private.as_checkpoint_hook
    def _recomputation_hook(self, tensor: torch.Tensor) -> torch.Tensor:
        # Do not rename: torch_private.in_recompute knows a recompute by this name, which is torch's.
        # What is held has no graph, which would hold whatever else it saved. Unlike `data`, `detach` keeps the version
        # of the tensor. A gradient that is taken inside the function uses the tensor.
        detached = tensor.detach() if tensor.requires_grad else tensor
        position = self.position
        self.position += 1
        if position >= self.count:
            return detached
        slot = self.slots[position]()
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
            if differs and self.compares_metadata and not self.difference:
                self._compare_metadata(slot.metadata, tensor, position)
            if self.fingerprints and not self.difference:
                self._compare_values(tensor, position)
        if position == self.last:
            raise Stop
        return detached

    def check_inputs(self) -> None:
        """Raise RecomputeError for an input that was written since the forward, unless its value is compared."""
        if self.compares_metadata and self.beginning.has_written_inputs and not self._is_allowed("inputs"):
            raise RecomputeError(
                "a tensor given by keyword, or inside a tuple, list or dict, was written in place between forward and "
                "backward.\nRecompute would read what it holds now, and gradients would be wrong. Write into a copy, "
                'or after backward; determinism_check="none" switches off only this check.'
            )

    def _is_allowed(self, what: str) -> bool:
        """Whether somebody may write "inputs" or "weights" before a recompute, if their values stay equal."""
        if self.fingerprints:
            self.findings.rewritten.add(what)
            return True
        return what in self.beginning.state.rewritten

    def _compare_metadata(self, forward: torch_private.Metadata, tensor: torch.Tensor, position: int) -> None:
        """Note a tensor whose metadata differ from those of the forward.

        A tensor that recompute makes may have another version: it may be written more or less often. A weight or a
        buffer may not, unless the block writes it itself. If the block does not, and values are compared, then the
        values decide: somebody may stream the weights of many blocks through one buffer.
        """
        recomputed = torch_private.metadata(tensor)
        if forward[:-1] != recomputed[:-1]:
            self.difference = f"saves {_readable(*recomputed)} where the forward saved {_readable(*forward)}"
            return
        # A Linear module saves a view of its weight. A view of a buffer counts by itself: the view may be a part that
        # was not written.
        written = tensor._base if isinstance(tensor._base, torch.nn.Parameter) else tensor
        modules = self.beginning.modules
        names = {value: name for m in modules for name, value in (*m.named_parameters(), *m.named_buffers())}
        if not (isinstance(written, torch.nn.Parameter) or written in names) or self._writes(written):
            return
        name = names.get(written, f"a parameter {tuple(written.shape)}")
        difference = f"uses other values of {name} than the forward did: it was written between forward and backward "
        difference += "(optimizer.step, an EMA swap, load_state_dict), or another adapter is active"
        if written in names or not self._has_equal_values(tensor, position, difference):
            self.difference = difference

    def _has_equal_values(self, weight: torch.Tensor, position: int, difference: str) -> bool:
        """Whether a weight was written with the values that it had, as far as is known: `check` compares them."""
        if self.fingerprints:
            forward, recomputed = self.fingerprints[position], fingerprint(weight)
            if forward is None or recomputed is None:
                return False
            self.findings.differences.append(Difference(forward, recomputed, 0.0, difference))
        return self._is_allowed("weights")

    def _compare_values(self, tensor: torch.Tensor, position: int) -> None:
        forward = self.fingerprints[position]
        recomputed = None if forward is None else fingerprint(tensor)
        if forward is None or recomputed is None:
            return
        # Later tensors are computed from this one, in another dtype or not: its noise is in them.
        allowed = tolerance(forward.dtype)
        if allowed:
            allowed = self.allowed = max(self.allowed, allowed)
        if forward.is_read_later or relative_difference(forward, recomputed) > allowed:
            where = place(module_of(self.beginning.function), tensor, self.runs)
            if where is not None:
                what = f"does not compute what the forward did. The first difference is {where}"
                self.findings.differences.append(Difference(forward, recomputed, allowed, what))

    def _writes(self, tensor: torch.Tensor) -> bool:
        """Whether the block has written a weight in this recompute."""
        return self.versions.get(tensor, tensor._version) != tensor._version

    def check(self) -> bool:
        """The function has run. Raise RecomputeError if something differs from the forward.

        Returns:
            Whether numbers on an accelerator are read at the end of this backward. If they are right, that ends the
            block's step.
        """
        if self.position != self.count:
            raise RecomputeError(
                f"recompute saved {self.position} tensors for backward where the forward saved {self.count}: it took "
                f"another path.\n{causes.explain(self.beginning)}An adapter that was switched, disabled or fused "
                f"before backward does that, another flag, a cache, random numbers, other settings of the compiler. "
                f"Keep them until it is done. So does torch.func.jvp with gradients on: run it under torch.no_grad()."
            )
        state, findings = self.beginning.state, self.findings
        if state.writes is None:
            state.writes = any(map(self._writes, self.versions))
        if self.difference or findings.differences:
            findings.block, findings.causes = describe(self.beginning.function), causes.explain(self.beginning)
        if self.difference:
            raise findings.error(self.difference)
        return findings.check()


class Difference(NamedTuple):
    """A tensor that may differ between forward and recompute."""

    forward: Fingerprint
    recomputed: Fingerprint
    # The noise that is allowed between the two.
    allowed: float
    # What recompute does, in words.
    what: str


@dataclasses.dataclass
class Findings:
    """What one recompute found of values."""

    state: BlockState
    # The block, in words.
    block: str = ""
    differences: list[Difference] = dataclasses.field(default_factory=list)
    # What was written before the recompute: "inputs", "weights". If no value differs, that is the block's habit.
    rewritten: set[str] = dataclasses.field(default_factory=set)
    # Sentences on what may explain a difference.
    causes: str = ""

    def check(self) -> bool:
        """Raise for a difference on a CPU. Returns whether others are to be read at the end of this backward."""
        self.raise_first(difference for difference in self.differences if not difference.forward.is_read_later)
        self.differences = [difference for difference in self.differences if difference.forward.is_read_later]
        if self.differences:
            _read_at_end_of_backward(self)
        else:
            self.state.rewritten |= self.rewritten
        return bool(self.differences)

    def raise_first(self, differences: Iterable[Difference]) -> None:
        """Raise the error of the first tensor that differs by more than noise."""
        for forward, recomputed, allowed, what in differences:
            apart = relative_difference(forward, recomputed)
            if apart > allowed:
                relative = f"relative difference {apart:.1e}, {allowed:.1e} is noise"
                seen = relative if tolerance(forward.dtype) else "whole numbers differ"
                raise self.error(f"{what} ({seen}).\nEarlier steps may be wrong, too (compared: 0, 1, 2, 4, 8, ...)")

    def error(self, what: str) -> RecomputeError:
        """The error for a recompute that differs. what: it does, in words."""
        return RecomputeError(
            f"recompute {what}.\n{self.causes}{'Or something' if self.causes else 'Something'} besides its arguments "
            f"changed before backward: an adapter or its scale, weights, a cache, a context variable, random numbers "
            f"of another generator than the default one, or a state that the block changes itself. Gradients would be "
            f"wrong.\nKeep it unchanged until backward is done (a LoRA's scale: by set_adapters), or pass it to the "
            f'block; determinism_check="none" switches off only this check.',
            self.block,
        )


class _Unread:
    """What the recomputes of one backward found, with numbers on an accelerator.

    Only the callback of that backward holds it. If the backward raises, it is dropped: a later backward would otherwise
    report differences that are not its own.
    """

    def __init__(self, backward: int) -> None:
        self.backward = backward
        self.found: list[Findings] = []

    def check(self) -> None:
        """Read all numbers, and raise RecomputeError if some differ."""
        # A region that is recomputed from here on, by the callback of somebody else, has to be read on its own.
        process.unread_comparisons.pop(self.backward, None)
        pairs = [(each.forward, each.recomputed) for findings in self.found for each in findings.differences]
        numbers = iter(read([*itertools.chain(*pairs)]))
        for findings in self.found:
            findings.raise_first(
                difference._replace(forward=next(numbers), recomputed=next(numbers))
                for difference in findings.differences
            )
        for findings in self.found:
            findings.state.rewritten |= findings.rewritten
            findings.state.recomputed = True


def _read_at_end_of_backward(findings: Findings) -> None:
    # -1: somebody reads a saved tensor outside a backward, or compiled autograd runs, which drops callbacks. Nothing
    # would read the numbers later, so they are read now.
    backward = -1 if torch_private.in_compiled_autograd() else torch_private.running_backward()
    unread = process.unread_comparisons.get(backward) or _Unread(backward)
    unread.found.append(findings)
    if backward == -1:
        unread.check()
    elif len(unread.found) == 1:
        process.unread_comparisons[backward] = unread
        # An error skips the callbacks that come later, and DDP's forwards fail if its own is skipped. So this callback
        # only queues the check, which makes it the last.
        torch_private.at_end_of_backward(functools.partial(torch_private.at_end_of_backward, unread.check))


def _readable(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device, _: int) -> str:
    return f"a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def place(module: torch.nn.Module | None, tensor: torch.Tensor, runs: types.CodeType) -> str | None:
    """In words: the op that computed a tensor that autograd is about to save, and the module in `module` that saves it.

    None for running statistics, or a copy of them: norms of batches and instances write them, and do not use them in
    backward.

    runs: code of the frame at which the search for the module ends. Reading the local variables of the frames beyond
    it would keep these variables alive.
    """
    names = {} if module is None else {inner: name for name, inner in module.named_modules()}
    op = "" if tensor.grad_fn is None else re.sub(r"Backward\d*$", "", tensor.grad_fn.name())
    result = f"the result of {op}" if op else f"a tensor {tuple(tensor.shape)}"
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not runs:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            if getattr(owner, "running_mean", None) is not None and tensor.dim() == 1 and not tensor.requires_grad:
                return None
            if module is None or owner in names:
                return f"{result}, saved by {names.get(owner) or class_name(owner)}"
        frame = frame.f_back
    return result
