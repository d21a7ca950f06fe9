"""A step of the whole model, from a simulation of a few of its blocks, and what any policy holds at each moment of it.

Blocks of one list that are alike do the same, one after the other. Of a long list its first two and last two blocks are
simulated; where the two in the middle did the same, what they did is repeated for those that were left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fastac.planning.simulation import BACKWARD, FORWARD, LOSS, Candidate, Event, Place, Segment, Simulation

ENDS = 2
"""How many blocks at each end of a list are simulated."""


@dataclasses.dataclass(frozen=True)
class BlockList:
    """Blocks of a model that run one after the other, by name; and those of them that were simulated."""

    names: tuple[str, ...]
    simulated: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all were simulated."""
        return self.names == self.simulated

    @property
    def left_out(self) -> tuple[str, ...]:
        """The blocks that were not."""
        return () if self.is_whole else self.names[ENDS : len(self.names) - ENDS]


def ends_of(names: Sequence[str]) -> tuple[str, ...]:
    """The blocks of a list that are simulated at first."""
    return tuple(names) if len(names) <= 2 * ENDS else (*names[:ENDS], *names[-ENDS:])


class Timeline:
    """Every allocation of a step, in order, and how it changes with what is saved.

    candidates: by block. flops: by phase. Bytes are those of what the step allocates: of weights only the gradients.
    """

    def __init__(self, segments: Sequence[Segment], candidates: Mapping[str, Sequence[Candidate]]) -> None:
        self.candidates = {block: list(found) for block, found in candidates.items()}
        self.flops: dict[str, int] = {}
        for segment in segments:
            for phase, count in segment.flops.items():
                self.flops[phase] = self.flops.get(phase, 0) + count
        self._numbers = {
            (block, place): number
            for number, (block, place) in enumerate(
                (block, place) for block, found in self.candidates.items() for place in range(len(found))
            )
        }
        forward = next(i for i, segment in enumerate(segments) if segment.kind == LOSS)
        self._forward_ends = sum(len(segment.events) for segment in segments[:forward])
        events = [event for segment in segments for event in segment.events]
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
        avoided = sum(self.candidates[block][place].flops for block, place in saved)
        return self.flops.get("recompute", 0) - avoided

    def _deltas(self, saved: Collection[Place], gradient_shards: int) -> np.ndarray:
        is_saved = np.zeros(len(self._numbers) + 1, np.int64)
        for place in saved:
            is_saved[self._numbers[place]] = 1
        deltas: np.ndarray = self._bytes + self._change * is_saved[self._owner]
        if gradient_shards > 1:
            deltas = deltas - self._gradients + self._gradients // gradient_shards
        return deltas


def middles_are_alike(forward: Simulation, lists: Sequence[BlockList]) -> bool:
    """Whether the blocks that are left out do what the early block in the middle does, in a forward of the whole."""
    for blocks in lists:
        if blocks.is_whole:
            continue
        early = blocks.names[ENDS - 1]
        for name in blocks.left_out:
            if not _are_alike(forward.segments, forward.candidates, early, name):
                return False
    return True


def repeated(simulation: Simulation, lists: Sequence[BlockList]) -> Timeline | None:
    """The step of the whole model; None where the blocks in the middle of a list are not alike."""
    segments = list(simulation.segments)
    candidates = {}
    for blocks in lists:
        mine = {name: simulation.candidates.get(name, []) for name in blocks.simulated}
        again = {region: found for region, found in simulation.candidates.items() if region.partition("#")[0] in mine}
        mine.update(again)
        if not blocks.is_whole:
            if any("#" in region for region in mine):
                return None  # blocks that are called several times
            early, late = blocks.simulated[ENDS - 1], blocks.simulated[ENDS]
            if not _are_alike(segments, mine, early, late):
                return None
            segments = _repeat(segments, blocks, early, late)
            mine = {name: mine.get(name, mine[early]) for name in blocks.names}
        candidates.update(mine)
    return Timeline(segments, candidates)


def _are_alike(
    segments: Sequence[Segment], candidates: Mapping[str, Sequence[Candidate]], early: str, late: str
) -> bool:
    def done_by(block: str) -> list[object]:
        return [
            (
                segment.kind,
                segment.flops,
                [
                    (e.bytes, e.change, e.gradient, e.candidate and (e.candidate[0] == block, e.candidate[1]))
                    for e in segment.events
                ],
            )
            for segment in segments
            if segment.block == block
        ]

    return done_by(early) == done_by(late) and candidates.get(early) == candidates.get(late)


def _repeat(segments: Sequence[Segment], blocks: BlockList, early: str, late: str) -> list[Segment]:
    """The segments of one of the two blocks in the middle, for each that was left out, in the order of its calls."""
    index = {name: i for i, name in enumerate(blocks.names)}
    found: list[Segment] = []
    for segment in segments:
        if segment.block not in index:
            found.append(segment)
            continue
        found.append(_moved(segment, blocks, index[segment.block]))
        if (segment.kind, segment.block) == (FORWARD, early):
            found += [_moved(segment, blocks, index[name]) for name in blocks.left_out]
        elif (segment.kind, segment.block) == (BACKWARD, late):
            found += [_moved(segment, blocks, index[name]) for name in blocks.left_out[::-1]]
    return found


def _moved(segment: Segment, blocks: BlockList, to: int) -> Segment:
    """A segment of one block for the block of a number: a neighbour in the simulation is one in the whole, too.

    Backward may come to the recompute of a block before the gradient that begins its segment is there.
    """
    places = {name: i for i, name in enumerate(blocks.simulated)}
    by = to - places[segment.block]

    def moved(event: Event) -> Event:
        if event.candidate is None or event.candidate[0] not in places:
            return event
        block, place = event.candidate
        return dataclasses.replace(event, candidate=(blocks.names[places[block] + by], place))

    return Segment(segment.kind, blocks.names[to], list(map(moved, segment.events)), segment.flops)
