"""What sparse attention chose in one region: the indices that its top-k and sort calls gave.

A recompute may come out a little different and choose other blocks, which the saved outputs know nothing of. The values
of a sort are kept with the indices: where their sum decides, how many are chosen hangs on them. Those of a top-k are
taken from the recomputed tensor, with which they may be compared. Only choices among floating-point numbers are kept;
sorting whole numbers repeats itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from fastac import torch_internals
from fastac.entries import described
from fastac.registry import ResolvedOp
from fastac.rows import SelectionOp


class Choice:
    """One call: where in the user's code it was made and of what, and what it chose."""

    def __init__(
        self, place: Any, dimension: int, values: torch.Tensor, indices: torch.Tensor, among: int, keeps_values: bool
    ) -> None:
        self.place = place
        self.dimension = dimension
        self.values = torch_internals.clones((values,))[0] if keeps_values else None
        narrow = torch.int16 if among <= torch.iinfo(torch.int16).max else torch.int32
        self.indices = indices.to(narrow if among <= torch.iinfo(torch.int32).max else torch.int64)

    def made_again(self, tensor: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and indices, for the recomputed tensor. keep: they will be asked for again."""
        indices = self.indices.to(torch.int64, copy=True)
        if self.values is not None:
            return (torch_internals.clones((self.values,))[0] if keep else self.values), indices
        return tensor.gather(self.dimension, indices), indices

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it holds."""
        return self.indices.nbytes + (self.values.nbytes if self.values is not None else 0)


class Choices(list[Choice | None]):
    """The choices of one region, in order."""

    def keep(self, resolved: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Remember what a call of the forward chose."""
        if args[0].is_floating_point() and args[0].dim():
            dimension = resolved.argument("dim", args, kwargs)
            keeps_values = isinstance(resolved.row, SelectionOp) and resolved.row.keeps_values
            among = args[0].shape[dimension]
            self.append(Choice(_place(resolved, args), dimension, outputs[0], outputs[1], among, keeps_values))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that they hold."""
        return sum(choice.held_bytes for choice in self if choice is not None)


class Reader:
    """Goes through the choices of a region once more, in one recompute."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.position = 0

    def next(self, resolved: ResolvedOp, args: Sequence[Any], keep: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the forward chose in this call; None for a call that it did not make.

        Choices that recompute does not make again are passed over: a mask that the first call made and cached.
        """
        if not args[0].is_floating_point() or len(self.choices) == self.position:
            return None
        place = _place(resolved, args)
        for position in range(self.position, len(self.choices)):
            choice = self.choices[position]
            if choice is not None and choice.place == place:
                self.position = position + 1
                if not keep:
                    self.choices[position] = None
                return choice.made_again(args[0], keep)
        return None


def _place(resolved: ResolvedOp, args: Sequence[Any]) -> tuple[ResolvedOp, list[Any], CodeType | None, int]:
    """What tells one choice of a region from another: op, shapes, and the line of the user's code it came from."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        if not frame.f_globals.get("__name__", "").startswith(("fastac.", "torch.")):
            return resolved, described(args), frame.f_code, frame.f_lasti
        frame = caller
    return resolved, described(args), None, 0
