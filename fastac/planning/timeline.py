"""Every allocation of a step, in order, and the bytes that any policy holds at each moment of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from fastac.engine import offload
from fastac.policy import Policy

if TYPE_CHECKING:
    import numpy as np

Place = tuple[str, int]
"""A region, and the index of one of its candidates. A region is named as its block; a second call of it has "#2"."""

Policies = Mapping[str, Policy]
"""Policy of every block, by the block's name."""

EXCHANGED = "exchanged"
"""Name of the candidate after an attention under context parallelism: the outputs of its collectives."""


@dataclasses.dataclass
class Candidate:
    """One output of a block that could be saved instead of recomputed."""

    name: str  # of the Linear module in its block, or of the attention op; "" if it cannot be saved
    bytes: int = 0  # held from the forward to recompute if it is saved, above full checkpointing
    flops: int = 0  # of its recompute; 0 where recompute ends before it
    keys: int = 0  # that an attention call attends to; 0 for a Linear module


@dataclasses.dataclass
class Event:
    """One allocation, or one release (then bytes are below 0)."""

    bytes: int
    candidate: Place | None = None
    change: int = 0  # bytes to add if the candidate is saved
    gradient: bool = False  # of a parameter


class Moment(NamedTuple):
    """The index of an event without bytes, and the FLOPs of the step before it."""

    event: int
    flops: int


@dataclasses.dataclass
class Kept:
    """A storage that regions keep from forward to recompute: as an input, or as part of a saved candidate."""

    bytes: int
    inputs_of: list[str] = dataclasses.field(default_factory=list)
    candidate: Place | None = None


class HostCopy(NamedTuple):
    """Bytes of one region that are on the host alone from `left` to `returns`."""

    bytes: int
    leaves: Moment  # copies to the host begin,
    left: Moment  # and have ended
    returns: Moment  # copies back begin,
    returned: Moment  # and have ended


def block_name(region: str) -> str:
    """The name of the block that a region is a call of."""
    return region.partition("#")[0]


@dataclasses.dataclass
class Timeline:
    """One simulated step: bytes that it allocates (of weights only the gradients) and FLOPs, under any policies."""

    events: Sequence[Event]
    forward_ends: int  # number of events of the forward; the last of them has no bytes
    flops: Counter[str]  # by phase: forward, recompute, backward
    candidates: Mapping[str, Sequence[Candidate]]  # by region, in the order of the calls
    begins: Mapping[str, Sequence[Moment]]  # by region: of its forward, and of its recompute if there is one
    kept: Sequence[Kept]

    def __post_init__(self) -> None:
        import numpy as np  # not before a plan: the rest of fastac needs none

        places = ((region, place) for region, found in self.candidates.items() for place in range(len(found)))
        self._numbers: dict[Place | None, int] = {place: number for number, place in enumerate(places)}
        self._unsaved = np.zeros(len(self._numbers) + 1, np.int64)  # by number; the last for events of no candidate
        self._bytes = np.array([event.bytes for event in self.events], np.int64)
        self._gradients = np.array([event.bytes * event.gradient for event in self.events], np.int64)
        self._change = np.array([event.change for event in self.events], np.int64)
        self._owner = np.array([self._numbers.get(event.candidate, -1) for event in self.events], np.int64)

    def saved(self, policies: Policies) -> dict[Place, Candidate]:
        """The candidates that policies save."""

        def is_saved(policy: Policy, one: Candidate) -> bool:
            if one.keys:
                return policy.saves(one.keys)
            return (
                policy.saves_collectives if one.name == EXCHANGED else bool(one.name) and policy.saves_linear(one.name)
            )

        return {
            (region, place): one
            for region, found in self.candidates.items()
            for place, one in enumerate(found)
            if is_saved(policies[block_name(region)], one)
        }

    def saved_bytes(self, policies: Policies) -> int:
        """Bytes of the candidates that policies save."""
        return sum(one.bytes for one in self.saved(policies).values())

    def held(self, policies: Policies) -> int:
        """Bytes alive between forward and backward, on the device."""
        return int(self._deltas(policies, 1)[: self.forward_ends].sum())

    def peak(self, policies: Policies, gradient_shards: int = 1) -> int:
        """The most bytes alive at one time. gradient_shards: GPUs that share the gradients of parameters."""
        return int(self._deltas(policies, gradient_shards).cumsum().max(initial=0))

    def recomputed(self, policies: Policies) -> int:
        """FLOPs of recompute."""
        return self.flops["recompute"] - sum(one.flops for one in self.saved(policies).values())

    def copies(self, policies: Policies) -> list[HostCopy]:
        """Copies to host memory and back, one entry for each region that offloads, as `fastac.engine.offload` does it.

        A region that begins sends what the earlier ones keep, but for the last `keep`; it has left when the next one
        begins, or the forward ends. It returns with the recompute of the region after it. A storage leaves with the
        last region that keeps it, and stays if one keeps it on the device.
        """
        policy = {region: policies[block_name(region)] for region in self.begins}
        order = [region for region, begins in self.begins.items() if len(begins) > 1 and policy[region].offload]
        numbers = {region: number for number, region in enumerate(order)}
        saved, sizes = self.saved(policies), Counter[int]()
        for one in self.kept:
            goes = {numbers.get(region, -1): policy[region].offloads_inputs for region in one.inputs_of}
            if one.candidate in saved:
                region, _ = one.candidate
                goes[numbers.get(region, -1)] = policy[region].offloads_outputs
            if goes and all(goes.values()) and len(one.inputs_of) < 2 and one.bytes >= offload.SMALLEST:
                sizes[max(goes)] += one.bytes
        found, first = [], 0
        moments = [self.begins[region] for region in order]
        ends = [*(forward for forward, _ in moments[1:]), Moment(self.forward_ends - 1, self.flops["forward"])]
        for number, region in enumerate(order):
            for gone in range(first, number - policy[region].keep + 1):
                (leaves, _), (_, returned) = moments[number], moments[gone]
                returns = min(moments[gone + 1][1], returned, key=lambda moment: moment.event)
                found.append(HostCopy(sizes[gone], leaves, ends[number], returns, returned))
                first = gone + 1
        return [copies for copies in found if copies.bytes]

    def bytes_per_flop(self, policies: Policies) -> float:
        """The most bytes that are copied in one direction per FLOP that runs meanwhile."""
        saved = self.saved(policies)

        def between(first: Moment, last: Moment) -> int:
            again = {region for region, begins in self.begins.items() if first.event <= begins[-1].event < last.event}
            return max(1, last.flops - first.flops - sum(saved[place].flops for place in saved if place[0] in again))

        rates = [
            copies.bytes / min(between(copies.leaves, copies.left), between(copies.returns, copies.returned))
            for copies in self.copies(policies)
        ]
        return max(rates, default=0.0)

    def on_line(self, other: Timeline, part: Fraction) -> Timeline | None:
        """The step whose bytes and keys lie `part` of the way from this one's to another's. Its FLOPs mean nothing.

        All that a step allocates grows linearly with the tokens of a video. None if the two steps do not do the same.
        """

        if self._outline != other._outline:
            return None

        def between(mine: Any, theirs: Any) -> Any:  # numbers, or arrays of them
            return mine + (theirs - mine) * part.numerator // part.denominator

        def of_fields(mine: Any, theirs: Any) -> Any:
            pairs = {name: (size, vars(theirs)[name]) for name, size in vars(mine).items() if type(size) is int}
            return dataclasses.replace(mine, **{name: between(*pair) for name, pair in pairs.items()})

        candidates = {
            region: list(map(of_fields, found, other.candidates[region])) for region, found in self.candidates.items()
        }
        step = copy.copy(self)  # its events are this one's, and only their bytes in arrays are read
        step.candidates, step.kept = candidates, list(map(of_fields, self.kept, other.kept))
        step._bytes, step._change = between(self._bytes, other._bytes), between(self._change, other._change)
        step._gradients = between(self._gradients, other._gradients)
        return step

    @functools.cached_property
    def _outline(self) -> Any:
        """What the step does, without sizes."""
        names = {region: [one.name for one in found] for region, found in self.candidates.items()}
        events = [(event.candidate, event.gradient) for event in self.events]
        return names, events, [(one.inputs_of, one.candidate) for one in self.kept]

    def _deltas(self, policies: Policies, gradient_shards: int) -> np.ndarray:
        is_saved = self._unsaved.copy()
        is_saved[[self._numbers[place] for place in self.saved(policies)]] = 1
        deltas: np.ndarray = self._bytes + self._change * is_saved[self._owner]
        if gradient_shards > 1:
            deltas += self._gradients // gradient_shards - self._gradients
        for copies in self.copies(policies):
            deltas[copies.left.event] -= copies.bytes
            deltas[copies.returns.event] += copies.bytes
        return deltas
