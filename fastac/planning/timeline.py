"""Every allocation of a step, in order, and what any policy holds at each moment of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import numpy as np

from fastac.engine import offload
from fastac.policy import Policy

Place = tuple[str, int]
"""A region, and which of its candidates. A region has the name of its block; from a second call on, with "#2", ..."""

Policies = Mapping[str, Policy]
"""By region."""


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


@dataclasses.dataclass(frozen=True)
class Moment:
    """The number of an event without bytes, and the FLOPs of the step before it."""

    event: int
    flops: int


@dataclasses.dataclass
class Kept:
    """A storage that regions keep from forward to recompute: as an input, or since it is part of a saved candidate."""

    bytes: int
    inputs_of: list[str] = dataclasses.field(default_factory=list)
    candidate: Place | None = None


@dataclasses.dataclass(frozen=True)
class Copies:
    """What leaves the device with one region, between two moments of the forward, and is back between two later ones.

    Its bytes are on the host alone from `left` to `returns`.
    """

    bytes: int
    leaves: Moment
    left: Moment
    returns: Moment
    returned: Moment


class Timeline:
    """A step that was simulated, and how it changes with what is saved, and with what waits in host memory.

    forward_ends: how many of the events are the forward's; the last of these has no bytes. flops: by phase. candidates:
    by region, in the order of their calls. begins: of the forward of each region, and of its recompute if there is one.
    Bytes are those of what the step allocates: of weights only the gradients.

    Args of its methods: saved, the candidates that are; policies, of all regions, or none where nothing is offloaded.
    """

    def __init__(
        self,
        events: Sequence[Event],
        forward_ends: int,
        flops: Mapping[str, int],
        candidates: Mapping[str, Sequence[Candidate]],
        begins: Mapping[str, Sequence[Moment]],
        kept: Sequence[Kept],
    ) -> None:
        self.events, self.flops, self.candidates = events, flops, candidates
        self._begins, self._kept = begins, kept
        places = ((region, place) for region, found in candidates.items() for place in range(len(found)))
        self._numbers = {place: number for number, place in enumerate(places)}
        self._forward_ends = forward_ends
        self._bytes = np.array([event.bytes for event in events], np.int64)
        self._gradients = np.array([event.bytes if event.gradient else 0 for event in events], np.int64)
        self._change = np.array([event.change for event in events], np.int64)
        self._owner = np.array([self._numbers.get(event.candidate, -1) if event.candidate else -1 for event in events])

    def held(self, saved: Collection[Place] = (), policies: Policies | None = None) -> int:
        """Bytes alive between forward and backward, on the device."""
        return int(self._deltas(saved, policies, 1)[: self._forward_ends].sum())

    def peak(self, saved: Collection[Place] = (), policies: Policies | None = None, gradient_shards: int = 1) -> int:
        """The most bytes alive at one time, gradients of parameters among them, in so many parts."""
        return int(max(0, np.cumsum(self._deltas(saved, policies, gradient_shards)).max(initial=0)))

    def recomputed(self, saved: Collection[Place] = ()) -> int:
        """FLOPs of recompute."""
        avoided = sum(self.candidates[region][place].flops for region, place in saved)
        return self.flops.get("recompute", 0) - avoided

    def copies(self, saved: Collection[Place], policies: Policies | None) -> list[Copies]:
        """What waits in host memory between forward and backward, as `fastac.engine.offload` does it.

        A region that begins sends what the earlier ones keep, but for the last `keep`; it has left when the next one
        begins, or the forward ends. It returns with the recompute of the region after it. A storage leaves with the
        last region that keeps it, and stays where one keeps it on the device.
        """
        policies, saved = policies or {}, set(saved)
        order = [name for name, begins in self._begins.items() if len(begins) > 1 and name in policies]
        order = [name for name in order if policies[name].offload]
        numbers = {name: number for number, name in enumerate(order)}
        sizes = Counter[int]()
        for one in self._kept if order else ():
            goes = {numbers.get(name, -1): policies[name].offloads_inputs for name in one.inputs_of}
            if one.candidate is not None and one.candidate in saved:
                name, _ = one.candidate
                goes[numbers.get(name, -1)] = policies[name].offloads_outputs
            if goes and all(goes.values()) and len(one.inputs_of) < 2 and one.bytes >= offload.SMALLEST:
                sizes[max(goes)] += one.bytes
        found, first = [], 0
        moments = [self._begins[name] for name in order]
        ends = [*(forward for forward, _ in moments[1:]), Moment(self._forward_ends - 1, self.flops.get("forward", 0))]
        for number, name in enumerate(order):
            for gone in range(first, number - policies[name].keep + 1):
                (leaves, _), (_, returned) = moments[number], moments[gone]
                returns = min(moments[gone + 1][1], returned, key=lambda moment: moment.event)
                found.append(Copies(sizes[gone], leaves, ends[number], returns, returned))
                first = gone + 1
        return [copies for copies in found if copies.bytes]

    def bytes_per_flop(self, saved: Collection[Place], policies: Policies | None) -> float:
        """The most bytes that are copied in one direction per FLOP that runs meanwhile."""

        def between(first: Moment, last: Moment) -> int:
            again = {name for name, begins in self._begins.items() if first.event <= begins[-1].event < last.event}
            avoided = sum(self.candidates[name][place].flops for name, place in saved if name in again)
            return max(1, last.flops - first.flops - avoided)

        rates = [
            copies.bytes / min(between(copies.leaves, copies.left), between(copies.returns, copies.returned))
            for copies in self.copies(saved, policies)
        ]
        return max(rates, default=0.0)

    def on_line(self, other: Timeline, part: Fraction) -> Timeline | None:
        """The step whose bytes and keys lie so far on the lines from this one's to another's; it has no FLOPs.

        All that a step allocates grows linearly with the tokens of a video. None where the two do not do the same.
        """
        if [(e.candidate, e.gradient) for e in self.events] != [(e.candidate, e.gradient) for e in other.events]:
            return None
        if [(one.inputs_of, one.candidate) for one in self._kept] != [
            (one.inputs_of, one.candidate) for one in other._kept
        ]:
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
        kept = [
            dataclasses.replace(mine, bytes=at(mine.bytes, theirs.bytes))
            for mine, theirs in zip(self._kept, other._kept, strict=True)
        ]
        return Timeline(events, self._forward_ends, {}, candidates, self._begins, kept)

    def _deltas(self, saved: Collection[Place], policies: Policies | None, gradient_shards: int) -> np.ndarray:
        is_saved = np.zeros(len(self._numbers) + 1, np.int64)
        for place in saved:
            is_saved[self._numbers[place]] = 1
        deltas: np.ndarray = self._bytes + self._change * is_saved[self._owner]
        if gradient_shards > 1:
            deltas = deltas - self._gradients + self._gradients // gradient_shards
        for copies in self.copies(saved, policies):
            deltas[copies.left.event] -= copies.bytes
            deltas[copies.returns.event] += copies.bytes
        return deltas
