"""What sparse attention chose in one region: the indices that its top-k and sort calls gave.

A recompute may come out a little different and choose other blocks, which the saved outputs know nothing of. The values
of a sort are kept with the indices: where their sum decides, how many are chosen hangs on them. Those of a top-k are
taken from the recomputed tensor, with which they may be compared. Only choices among floating-point numbers are kept;
sorting whole numbers repeats itself.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from fastac import torch_internals
from fastac.entries import described
from fastac.errors import FastacError
from fastac.registry import ResolvedOp
from fastac.rows import SelectionOp

Outputs = tuple[torch.Tensor, torch.Tensor]
Calls = tuple[tuple[CodeType, int], ...]

TOLERANCE = 1 / 32
"""Of the largest number chosen among: how far apart two choices may lie that are the same one, recomputed."""


class Choice:
    """What one call chose. in_order: its indices are in the order of their values."""

    def __init__(self, dimension: int, outputs: Outputs, among: int, keeps_values: bool, in_order: bool) -> None:
        self.dimension = dimension
        self.values = torch_internals.clones(outputs[:1])[0] if keeps_values else None
        narrow = torch.int16 if among <= torch.iinfo(torch.int16).max else torch.int32
        self.indices = outputs[1].to(narrow if among <= torch.iinfo(torch.int32).max else torch.int64)
        self.in_order = in_order

    def made_again(self, tensor: torch.Tensor) -> Outputs:
        """Values and indices, for the recomputed tensor."""
        indices = self.indices.to(torch.int64, copy=True)
        if self.values is not None:
            return torch_internals.clones((self.values,))[0], indices
        return tensor.gather(self.dimension, indices), indices

    def made_again_where_it_fits(self, tensor: torch.Tensor, own: Outputs) -> Outputs:
        """As `made_again` where it might have been chosen from the recomputed tensor; its own choice where not.

        Decided on the device, for the whole tensor: nothing waits.
        """
        values, indices = self.made_again(tensor)
        if not indices.numel():
            return own
        mine, theirs = values if self.values is None else tensor.gather(self.dimension, indices), own[0]
        if not self.in_order:
            mine, theirs = mine.sort(self.dimension).values, theirs.sort(self.dimension).values
        largest = tensor.abs().masked_fill(~tensor.isfinite(), 0).amax()
        fits = ~((mine - theirs).abs() > TOLERANCE * largest).any()
        return torch.where(fits, values, own[0]), torch.where(fits, indices, own[1])

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it holds."""
        return self.indices.nbytes + (self.values.nbytes if self.values is not None else 0)


class Choices(dict[Any, list[Choice]]):
    """The choices of one region, by what tells them apart: the call, and where in the user's code it was made.

    They are kept as long as the region: a second backward, also through another output, chooses as the first did.
    """

    def keep(
        self, resolved: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs, inner: int = 0
    ) -> None:
        """Remember what a call of the forward chose. inner: how many regions lie between this one and the call."""
        if args[0].is_floating_point() and args[0].dim():
            dimension = resolved.argument("dim", args, kwargs)
            keeps_values = isinstance(resolved.row, SelectionOp) and resolved.row.keeps_values
            in_order = keeps_values or bool(resolved.argument("sorted", args, kwargs))
            choice = Choice(dimension, outputs, args[0].shape[dimension], keeps_values, in_order)
            self.setdefault(_place(resolved, args, kwargs, inner), []).append(choice)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that they hold."""
        return sum(choice.held_bytes for choices in self.values() for choice in choices)


class Reader:
    """Goes through the choices of a region once more, in one recompute."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.used: collections.Counter[Any] = collections.Counter()

    def choose(
        self,
        resolved: ResolvedOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Outputs],
        inner: int = 0,
    ) -> Outputs:
        """What the forward chose in this call. run: chooses anew, in a call that the forward did not make.

        Recompute may leave choices out or make more: of a mask, say, that is made once and cached. Calls of one line in
        a loop can not be told apart then, and what was kept counts only where it fits the numbers.
        Raises FastacError where recompute makes a second choice in a place in which the forward made one.
        """
        if not self.choices or not args[0].is_floating_point():
            return run()
        place = _place(resolved, args, kwargs, inner)
        kept = self.choices.get(place)
        if kept is None:
            return run()
        position = self.used[place]
        self.used[place] += 1
        if len(kept) > 1:
            return kept[position].made_again_where_it_fits(args[0], run()) if position < len(kept) else run()
        if position:
            raise FastacError(
                f"recompute called {resolved.name} more often than the forward did, in one place "
                f"({_readable(place[-1])}): what is cached there changed in between. Cache it outside the checkpointed "
                f'function, or use policy="full" for this block.'
            )
        return kept[0].made_again(args[0])


def _place(resolved: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, Any], inner: int) -> tuple[Any, ...]:
    """What tells one choice of a region from another: op, arguments, and the user's calls that led to it."""
    options = [value for value in (*args[1:], *kwargs.values()) if not isinstance(value, torch.Tensor)]
    return resolved, *options, *described(args), _calls(inner)


def _calls(inner: int) -> Calls:
    """The calls that lead from a region to here, without those of torch and fastac; the last alone, outside regions."""
    calls: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    in_checkpoint = False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        was_in_checkpoint = in_checkpoint
        in_checkpoint = module == "torch.utils.checkpoint" and frame.f_code.co_name != "__torch_dispatch__"
        if in_checkpoint and not was_in_checkpoint:
            if not inner:
                return tuple(calls)
            inner -= 1
        if not module.startswith(("fastac.", "torch.")):
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(calls[:1])


def _readable(calls: Calls) -> str:
    return " in ".join(f"{code.co_name} of {Path(code.co_filename).name}" for code, _ in calls[:2]) or "torch"
