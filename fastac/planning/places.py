"""Three places for what a block could save: it is run again, stays on the device, or waits on the host.

The first blocks of a model wait on the host: backward needs them last, so their copies free memory for the longest
time. The other blocks stay on the device. So a choice is a number of blocks that leave, outputs for these within the
memory of the host and the rate of its bus, and outputs for the other blocks within the memory of the device. Each of
the two is a knapsack. One simulated step gives the bytes that are alive at every moment, under any choice.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastac.errors import readable_bytes
from fastac.planning import knapsack
from fastac.planning.forecast import ROWS, Forecast, policy_of
from fastac.planning.knapsack import EqualParts, Sums
from fastac.planning.timeline import Candidate, Policies, block_name
from fastac.policy import Policy

if TYPE_CHECKING:
    import numpy as np

POINTS = 2**16
"""The most sums of all steps of a knapsack together, as `knapsack.POINTS`. With 40 blocks, a list has 1,638."""

LEVELS = 640
"""The most levels of all blocks together. With 40 blocks, each has 16."""

TRIED = 16
"""So many numbers of blocks that leave are tried first, and then the numbers around the best of them."""

EVERYTHING = Policy("attn_only", linear=("*",))
"""Saves all outputs that could be saved."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What a step may use."""

    # Bytes of the device for everything that the step allocates: activations and gradients.
    memory: int
    # Bytes of the host.
    host: int = 0
    # The most bytes that are copied in each direction per FLOP that runs meanwhile.
    bytes_per_flop: float = math.inf


class Level(NamedTuple):
    """One set of outputs that a block could save."""

    bytes: int
    flops: int
    # As in `knapsack.Marks`.
    marks: frozenset[str | int]


def choose(
    forecast: Forecast, room: Room, *, linear: bool = True, gradient_shards: int | None = None
) -> dict[str, Policy] | None:
    """The policies of all blocks that avoid the most recompute in a room; None if no policies fit.

    If nothing fits otherwise, copies to the host may take longer than the computation beside them.

    Args:
        linear: whether outputs of Linear modules may be saved.
        gradient_shards: by default the number of GPUs; a large number if the gradients are allocated already.
    """
    search = _Places(forecast, room, linear, gradient_shards or forecast.gpus)
    # Without checkpointing nothing is run again either, and nothing has to be stored and put back. It holds more than
    # all outputs that could be saved.
    if search.everything_fits() and search.step_without_checkpointing() <= room.memory:
        return forecast.policies("none")
    found = search.best(room.bytes_per_flop)
    if found is None and room.bytes_per_flop < math.inf:
        found = search.best(math.inf)  # slow is better than out of memory
    return found


class _Places:
    """A search for the policies of all blocks of one model on one size of inputs."""

    def __init__(self, forecast: Forecast, room: Room, linear: bool, gradient_shards: int) -> None:
        self.forecast, self.room, self.gradient_shards = forecast, room, gradient_shards
        self.step = forecast.full
        # In the order of the forward. Blocks that do not run on these inputs come last.
        self.blocks = list(dict.fromkeys([*map(block_name, self.step.begins), *forecast.fake_model.blocks]))
        outputs = forecast.outputs()
        self.outputs = {block: [out for out in outputs.get(block, ()) if linear or out.keys] for block in self.blocks}
        self.exchanged = forecast.exchanged()
        self.levels = [self._levels(block) for block in self.blocks]
        self.points = POINTS // len(self.blocks)
        self.inputs, self.flops = self._copies()

    def _levels(self, block: str) -> tuple[Level, ...]:
        outputs = tuple((out.name, out.bytes, out.flops, out.keys) for out in self.outputs[block])
        return levels_of(outputs, self.exchanged[block], max(16, LEVELS // len(self.blocks)))

    def _copies(self) -> tuple[list[int], list[float]]:
        """For each block: bytes of its inputs that can leave, and the FLOPs that run beside its copies at least."""
        # What the next block replays takes no time that could hide a copy.
        replayed = {block: levels[-1].flops for block, levels in zip(self.blocks, self.levels, strict=True)}
        following = dict(itertools.pairwise(self.blocks))
        sizes, flops = Counter[str](), dict.fromkeys(self.blocks, math.inf)
        for copied in self.step.host_copies(dict.fromkeys(self.blocks, Policy("full", offload="inputs", keep=1))):
            block = block_name(copied.region)
            sizes[block] += copied.bytes
            back = copied.returned.flops - copied.returns.flops - replayed[following[block]]
            flops[block] = min(flops[block], max(1, copied.left.flops - copied.leaves.flops), max(1, back))
        return [sizes[block] for block in self.blocks], [flops[block] for block in self.blocks]

    def everything_fits(self) -> bool:
        """Whether all outputs of blocks fit the device."""
        return self.step.peak(self.forecast.policies(EVERYTHING), self.gradient_shards) <= self.room.memory

    def step_without_checkpointing(self) -> int:
        """The peak of a step without checkpointing."""
        return self.forecast.step("none").peak(self.forecast.policies("none"), self.gradient_shards)

    def cost(self, policies: Policies, rate: float) -> tuple[int, int] | None:
        """FLOPs that run again, and bytes on the host; None if the policies do not fit."""
        if self.step.peak(policies, self.gradient_shards) > self.room.memory:
            return None
        host = self.step.host_bytes(policies)
        if host > self.room.host or (host and self.step.bytes_per_flop(policies) > rate):
            return None
        return self.step.recomputed(policies), host

    def best(self, rate: float) -> dict[str, Policy] | None:
        """The best policies that are found, or a policy by name if that is better. rate: bytes per FLOP."""
        choices = [self.forecast.policies(policy) for policy in ROWS.values() if policy.checkpoints]
        choices += self._found(rate)
        costs = [(cost, number) for number, choice in enumerate(choices) if (cost := self.cost(choice, rate))]
        return choices[min(costs)[1]] if costs else None

    def _found(self, rate: float) -> Iterator[dict[str, Policy]]:
        """The best choices for several numbers of blocks that leave."""
        spare = [rate * flops - size for size, flops in zip(self.inputs, self.flops, strict=True)]
        host = _HostPart(self, spare)
        most = next((number for number, left in enumerate(spare) if left < 0), len(self.blocks) - 1)
        most = bisect.bisect_right(list(itertools.accumulate(self.inputs[:most])), self.room.host) if most else 0
        stride = max(1, most // TRIED)
        tried: dict[int, list[dict[str, Policy]]] = {}

        def recomputed(number: int) -> int:
            return min(map(self.step.recomputed, tried[number]))

        for number in [*range(0, most, stride), most]:
            tried[number] = list(self._leaving(number, host, 1))
        found = sorted((number for number in tried if tried[number]), key=recomputed)
        for nearest in found[:2]:
            for number in range(max(0, nearest - stride + 1), min(most, nearest + stride - 1) + 1):
                tried[number] = list(self._leaving(number, host, 8))
        for choices in tried.values():
            yield from choices

    def _leaving(self, number: int, host: _HostPart, variants: int) -> Iterator[dict[str, Policy]]:
        """Choices if so many blocks leave. variants: so many sizes of what each of them takes to the host are tried."""
        stay = dict.fromkeys(self.blocks[number:], Policy("full"))
        sizes = host.sizes if number else [0]
        # What leaves and returns is on the device for a while: the largest size that leaves room for the other blocks.
        largest = bisect.bisect_left(
            sizes,
            True,
            key=lambda size: (
                self.step.peak(host.policies(number, size) | stay, self.gradient_shards) > self.room.memory
            ),
        )
        for size in sizes[max(0, largest - variants) : largest]:
            leave = host.policies(number, size)
            staying = self._staying(number, leave | stay)
            if staying is not None:
                yield leave | staying

    def _staying(self, number: int, policies: Policies) -> dict[str, Policy] | None:
        """The policies of the blocks that stay, so that they avoid the most recompute. policies: if they save nothing.

        Outputs of a block are alive from its forward to its recompute. So while a block runs, in forward or backward,
        those of the blocks before it are alive, and some of its own.
        """
        alive = self.step.alive(policies, self.gradient_shards)
        before = []
        for place in range(number, len(self.blocks)):
            needs = [
                max((int((alive[zone] + added).max()) for zone, added in own), default=0) for own in self.zones[place]
            ]
            before.append([self.room.memory - need for need in needs])
        sums = _sums(self.levels[number:], self.room.memory, self.points, before)
        if not len(sums.bytes[-1]):
            return None
        levels = sums.levels(len(self.blocks) - number, len(sums.bytes[-1]) - 1)
        return {self.blocks[place]: self.policy(place, level) for place, level in enumerate(levels, number)}

    @functools.cached_property
    def zones(self) -> list[list[list[tuple[slice, np.ndarray]]]]:
        """For each level of each block: the events while the block runs, and the bytes that the level adds there."""
        begins = [moment.event for moments in self.step.begins.values() for moment in moments]
        ends = dict(itertools.pairwise([*sorted(begins), len(self.step.events)]))
        zones = []
        for place, block in enumerate(self.blocks):
            regions = [region for region in self.step.begins if block_name(region) == block]
            slices = [
                slice(moment.event, ends[moment.event]) for region in regions for moment in self.step.begins[region]
            ]
            of_block = []
            for level in range(len(self.levels[place])):
                policy = self.policy(place, level)
                places = [saved for region in regions for saved in self.step.saved_by(region, policy)]
                added = self.step.added(places).cumsum()
                of_block.append([(zone, added[zone]) for zone in slices])
            zones.append(of_block)
        return zones

    def policy(self, place: int, level: int) -> Policy:
        """The policy with which a block saves a level."""
        outputs = self.outputs[self.blocks[place]]
        return policy_of(self.levels[place][level].marks, outputs, "save", self.exchanged[self.blocks[place]] > 0)


class _HostPart:
    """What the first blocks take to the host."""

    def __init__(self, search: _Places, spare: Sequence[float]) -> None:
        """spare: for each block, the bytes that its copies may have besides its inputs."""
        self.search, self.spare = search, spare
        self.sizes = sorted({level.bytes for levels in search.levels for level in levels})
        self._sums: dict[int, Sums] = {}

    def policies(self, number: int, size: int) -> dict[str, Policy]:
        """The policies of the first `number` blocks, if each of them takes no more than `size` bytes of outputs."""
        search = self.search
        if size not in self._sums:
            limits = [min(size, max(0, spare)) for spare in self.spare]
            levels = [
                [level for level in levels if level.bytes <= limit]
                for levels, limit in zip(search.levels, limits, strict=True)
            ]
            self._sums[size] = _sums(levels, search.room.host, search.points)
        sums = self._sums[size]
        left = search.room.host - sum(search.inputs[:number])
        point = int(sums.bytes[number].searchsorted(left, side="right")) - 1
        return {
            search.blocks[place]: replace(search.policy(place, level), offload=True, keep=1)
            for place, level in enumerate(sums.levels(number, point))
        }


@functools.lru_cache
def levels_of(outputs: tuple[tuple[str, int, int, int], ...], exchanged: int, most: int) -> tuple[Level, ...]:
    """What a block could save, from nothing to everything, each with more bytes and more FLOPs than the one before.

    Args:
        outputs: name, bytes, FLOPs and keys of each output, as in `Candidate`.
        exchanged: bytes of collectives that are saved if anything is.
        most: more levels than this are thinned.
    """
    parts = knapsack.ladders([Candidate(*output) for output in outputs])
    sums = Sums([EqualParts(levels, 1) for levels, _ in parts], sys.maxsize, most)
    found = []
    for point, (size, flops) in enumerate(zip(sums.bytes[-1].tolist(), sums.flops[-1].tolist(), strict=True)):
        taken = zip(parts, sums.levels(len(parts), point), strict=True)
        marks = frozenset(marks[level - 1] for (_, marks), level in taken if level)
        found.append(Level(size + exchanged * bool(marks), flops, marks))
    return tuple(found)


def _sums(levels: Sequence[Sequence[Level]], limit: int, points: int, before: Sequence[Sequence[int]] = ()) -> Sums:
    parts = [EqualParts(tuple((level.bytes, level.flops) for level in block), 1) for block in levels]
    return Sums(parts, limit, points, every=True, before=before)


def least(forecast: Forecast, room: Room, gradient_shards: int) -> dict[str, Policy]:
    """The policies that hold least on the device."""
    full, leaving = (forecast.policies(Policy("full", offload=offload)) for offload in (False, True))
    choices = [full] + [leaving] * (forecast.full.host_bytes(leaving) <= room.host)
    return min(choices, key=lambda choice: forecast.full.peak(choice, gradient_shards))


def missing(forecast: Forecast, room: Room, *, gradient_shards: int | None = None) -> str:
    """Why nothing fits a room, and what would fit. The arguments are those of `choose`."""
    shards = gradient_shards or forecast.gpus
    leaving = forecast.policies(Policy("full", offload=True))
    peak, peak_leaving = (forecast.full.peak(choice, shards) for choice in (least(forecast, room, shards), leaving))
    with_host = (
        f" ({readable_bytes(peak_leaving)} with {readable_bytes(forecast.full.host_bytes(leaving))} of host memory)"
    )
    # Gradients do not grow with the tokens, and nearly everything else that a step allocates does.
    gradients = forecast.gradients if shards == forecast.gpus else 0
    share = (room.memory - gradients) / max(1, peak - gradients)
    return (
        f"a step takes {readable_bytes(peak)} at least{with_host * (peak_leaving < peak)}, and "
        f"{readable_bytes(max(0, room.memory))} are there for it. "
        + (f"About {share:.0%} of the tokens would fit" if share > 0.01 else "Not even a few tokens would fit")
        + ": fewer frames, a smaller size or batch, LoRA, or more GPUs that share the weights."
    )
