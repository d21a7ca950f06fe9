"""A region under a budget that is not shared out yet: watched for what it could save, and nothing is saved.

What is found: every output that could be saved, the bytes it would hold, and the FLOPs that recompute would not do.
Those are known after the recompute: it ends early, once autograd has what it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastac import flops, torch_internals
from fastac.budget import Output
from fastac.policy import Policy
from fastac.registry import ResolvedOp
from fastac.replay import Replay
from fastac.scopes import Tape
from fastac.tape import Record


@dataclasses.dataclass
class Survey:
    """What one region could save. found: place on the tape -> output; communicated: bytes of saved collectives.

    reached: how many calls of the tape recompute made, None before it ran.
    marks: of outputs whose changes can be noticed, what shares their version counters and holds no memory.
    """

    found: dict[int, Output] = dataclasses.field(default_factory=dict)
    communicated: int = 0
    reached: int | None = None
    marks: dict[int, tuple[tuple[Any, ...], Sequence[int | None]]] = dataclasses.field(default_factory=dict)

    def leave_out_changed(self) -> None:
        """Leave out Linear modules of which an output was changed in place: legal, and it could not be replayed."""
        places = [
            place for place, (marks, versions) in self.marks.items() if torch_internals.versions(marks) != versions
        ]
        names = {self.found[place].name for place in places}
        self.found = {place: output for place, output in self.found.items() if output.name not in names}
        self.marks = {}

    @property
    def outputs(self) -> list[Output]:
        """The outputs, without FLOPs where recompute does not get to them anyhow."""
        reached = self.reached or 0
        return [
            output if place < reached else dataclasses.replace(output, flops=0) for place, output in self.found.items()
        ]


def together(surveys: Sequence[Survey]) -> Survey:
    """The survey of a block that is called several times in one pass."""
    outputs = [output for survey in surveys for output in survey.outputs]
    return Survey(dict(enumerate(outputs)), sum(survey.communicated for survey in surveys), len(outputs))


class SurveyRecord(Record):
    """Keeps what could be saved until the region ends, and looks how large it is."""

    def __init__(
        self,
        tape: Tape,
        policy: Policy,
        preserves_generators: bool,
        observer: AbstractContextManager[Any] | None,
        survey: Survey,
    ) -> None:
        super().__init__(tape, policy, preserves_generators, observer)
        self.survey = survey
        self._flops: dict[int, int] = {}

    def __enter__(self) -> SurveyRecord:
        super().__enter__()
        self.checkpoint = torch_internals.innermost_checkpoint()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._take_notes()

    def call(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place = len(self.tape)
        outputs = super().call(resolved, keyset, args, kwargs)
        if len(self.tape) > place:
            self._flops[place] = flops.of_call(resolved.op, args, kwargs, outputs)
        return outputs

    def multiply(
        self, linear: str, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Keep a product, until the region ends."""
        place = len(self.tape)
        outputs = super().multiply(linear, resolved, keyset, args, kwargs)
        if len(self.tape) > place:
            self._flops[place] = flops.of_call(resolved.op, args, kwargs, outputs)
            entry = self.tape[place]
            if entry is not None and torch_internals.innermost_checkpoint() != self.checkpoint:
                entry.forget()  # a torch.utils.checkpoint of the block's own runs it again, saved or not
        return outputs

    def no_product(self, module: torch.nn.Linear, name: str) -> None:
        """It can not be saved, so it is no candidate."""

    def _take_notes(self) -> None:
        for place, entry in enumerate(self.tape):
            if entry is None or entry.kept is None:
                continue
            if place not in self._flops:
                self.survey.communicated += entry.saved_bytes
                continue
            name = entry.linear or entry.resolved.name
            self.survey.found[place] = Output(name, entry.saved_bytes, self._flops[place], int(entry.keys))
            if entry.linear and entry.guarded:
                self.survey.marks[place] = torch_internals.emptied(entry.kept), entry.versions
            entry.forget()


class SurveyReplay(Replay):
    """Runs everything again, and notes how far it got."""

    def __init__(self, tape: Tape, survey: Survey) -> None:
        super().__init__(tape)
        self.survey = survey

    def __exit__(self, *exception: object) -> None:
        if exception[0] in (None, torch_internals.StopRecompute):
            self.survey.leave_out_changed()
            self.survey.reached = max(self.survey.reached or 0, self.position)
        super().__exit__(*exception)

    def no_product(self, module: torch.nn.Linear, name: str) -> None:
        """Nor did it in the forward."""
