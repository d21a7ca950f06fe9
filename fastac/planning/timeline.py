"""Every allocation of a step, in order, and what any policy holds at each moment of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import numpy as np

Place = tuple[str, int]
"""A region, and which of its candidates. A region has the name of its block; from a second call on, with "#2", ..."""


@dataclasses.dataclass
class Candidate:
    """One output of a block that could be saved: of an attention call (keys > 0), or of a Linear module.

    name: of the Linear module, "" where it cannot be saved; or of the attention op. bytes: what it holds
    from the forward to recompute when it is saved. flops: of its recompute, 0 where that ends before it.
    """

    name: str
    keys: int = 0
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass
class Event:
    """Bytes that are allocated at one moment; freed, below 0.

    change: what they are more where the candidate is saved. gradient: it is the gradient of a parameter.
    """

    bytes: int
    candidate: Place | None = None
    change: int = 0
    gradient: bool = False


class Timeline:
    """A step that was simulated, and how it changes with what is saved.

    forward_ends: how many of the events are the forward's. flops: by phase. candidates: by region, in the order of
    their calls. Bytes are those of what the step allocates: of weights only the gradients.
    """

    def __init__(
        self,
        events: Sequence[Event],
        forward_ends: int,
        flops: Mapping[str, int],
        candidates: Mapping[str, Sequence[Candidate]],
    ) -> None:
        self.events, self.flops, self.candidates = events, flops, candidates
        places = ((region, place) for region, found in candidates.items() for place in range(len(found)))
        self._numbers = {place: number for number, place in enumerate(places)}
        self._forward_ends = forward_ends
        self._bytes = np.array([event.bytes for event in events], np.int64)
        self._gradients = np.array([event.bytes if event.gradient else 0 for event in events], np.int64)
        self._change = np.array([event.change for event in events], np.int64)
        self._owner = np.array([self._numbers.get(event.candidate, -1) if event.candidate else -1 for event in events])

    def held(self, saved: Collection[Place] = ()) -> int:
        """Bytes alive between forward and backward."""
        return int(self._deltas(saved, 1)[: self._forward_ends].sum())

    def peak(self, saved: Collection[Place] = (), gradient_shards: int = 1) -> int:
        """The most bytes alive at one time, gradients of parameters among them, in so many parts."""
        return int(max(0, np.cumsum(self._deltas(saved, gradient_shards)).max(initial=0)))

    def recomputed(self, saved: Collection[Place] = ()) -> int:
        """FLOPs of recompute."""
        avoided = sum(self.candidates[region][place].flops for region, place in saved)
        return self.flops.get("recompute", 0) - avoided

    def on_line(self, other: Timeline, part: Fraction) -> Timeline | None:
        """The step whose bytes and keys lie so far on the lines from this one's to another's; it has no FLOPs.

        All that a step allocates grows linearly with the tokens of a video. None where the two do not do the same.
        """
        if [(e.candidate, e.gradient) for e in self.events] != [(e.candidate, e.gradient) for e in other.events]:
            return None

        def at(mine: int, theirs: int) -> int:
            return mine + (theirs - mine) * part.numerator // part.denominator

        events = [
            dataclasses.replace(mine, bytes=at(mine.bytes, theirs.bytes), change=at(mine.change, theirs.change))
            for mine, theirs in zip(self.events, other.events, strict=True)
        ]
        candidates = {
            region: [
                dataclasses.replace(mine, bytes=at(mine.bytes, theirs.bytes), keys=at(mine.keys, theirs.keys))
                for mine, theirs in zip(found, other.candidates[region], strict=True)
            ]
            for region, found in self.candidates.items()
        }
        return Timeline(events, self._forward_ends, {}, candidates)

    def _deltas(self, saved: Collection[Place], gradient_shards: int) -> np.ndarray:
        is_saved = np.zeros(len(self._numbers) + 1, np.int64)
        for place in saved:
            is_saved[self._numbers[place]] = 1
        deltas: np.ndarray = self._bytes + self._change * is_saved[self._owner]
        if gradient_shards > 1:
            deltas = deltas - self._gradients + self._gradients // gradient_shards
        return deltas
