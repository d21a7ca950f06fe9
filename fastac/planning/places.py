"""The best policies of all blocks for a number of bytes, or for the memories of device and host.

Outputs that blocks could save stand in one list. Outputs that avoid the most FLOPs of recompute for a byte stand first.
A choice has the longest beginning of the list that fits, and from behind it the outputs that fit into the rest.

There are three places for an output: it is made again, stays on the device, or waits on the host. The first blocks of a
model wait on the host: backward needs them last, so their copies free memory for the longest time. So a choice is a
number of blocks that leave, outputs of these within the memory of the host and the rate of its bus, and outputs of the
other blocks within the memory of the device. One step gives the bytes that are alive at every moment, under any choice.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence

from fastac.errors import readable_bytes
from fastac.planning.forecast import ROWS, Forecast, Output
from fastac.planning.timeline import Policies
from fastac.policy import Policy

logger = logging.getLogger("fastac")

TRIED = 8
"""So many numbers of blocks that leave are tried first, and then numbers around the best of them."""

EVERYTHING = Policy("attn_only", linear=("*",))
"""Saves all outputs that could be saved."""

Fits = Callable[[Sequence[Output]], bool]
"""Whether outputs fit together. If they do, so do fewer of them."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What a step may use."""

    # Bytes of the device.
    memory: int
    # Bytes of the host.
    host: int = 0
    # The most bytes that are copied in each direction per FLOP that runs meanwhile.
    bytes_per_flop: float = math.inf


def longest(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """What was taken, and the longest beginning of a list that fits beside it."""
    ends = range(1, len(listed) + 1)
    count = bisect.bisect_left(ends, True, key=lambda end: not fits([*taken, *listed[:end]]))
    return [*taken, *listed[:count]]


def filled(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """The same, and behind that beginning, of each group of equal outputs as many as fit."""
    chosen = longest(listed, fits, taken)
    rest = listed[len(chosen) - len(taken) :]
    for _, group in itertools.groupby(rest, key=lambda out: (out.mark, out.bytes)):
        equal = list(group)
        if fits([*chosen, equal[0]]):  # mostly not: this saves a bisection
            chosen = longest(equal, fits, chosen)
    return chosen


def within(
    forecast: Forecast, limit: int, linear: bool = True, offload: bool = False, warns: bool = True
) -> dict[str, Policy]:
    """The policies of all blocks that avoid the most recompute with `limit` bytes of saved outputs.

    Collectives of context parallelism count first. If they exceed the limit by themselves, they are issued again.

    linear: whether outputs of Linear modules may be among them. offload: whether they, and inputs of blocks, wait in
    host memory. warns: a warning says if nothing is saved.
    """
    step, listed = forecast.full, forecast.ranked(linear)
    collectives = "save" if step.saved_bytes(forecast.saving(())) <= limit else "recompute"

    def size(chosen: Sequence[Output]) -> int:
        return step.saved_bytes(forecast.saving(chosen, collectives))

    chosen = forecast.saving(filled(listed, lambda chosen: size(chosen) <= limit), collectives)
    choices = [chosen, *map(forecast.policies, ("attn_only", "long_attn_only"))]
    best = min((choice for choice in choices if step.saved_bytes(choice) <= limit), key=step.recomputed)
    if warns and not any(policy.is_selective for policy in best.values()):
        # Attention over fewer keys than the most is saved only together with the longest.
        least = min((size([out]) for out in listed), default=None)
        why = "no output of a block can be saved" if least is None else f"the smallest output takes {least} bytes"
        logger.warning("plan.within(%s) saves nothing: %s", readable_bytes(limit), why)
    return {block: dataclasses.replace(policy, offload=offload) for block, policy in best.items()}


def choose(forecast: Forecast, room: Room, *, linear: bool = True, waits: bool = True) -> dict[str, Policy] | None:
    """The policies of all blocks that avoid the most recompute in a room; None if no policies fit.

    Args:
        linear: whether outputs of Linear modules may be saved.
        waits: if nothing fits otherwise, copies to the host may take longer than the computation beside them.
    """
    # Without checkpointing nothing is run again either, and nothing has to be stored and put back. It holds more than
    # all outputs that could be saved.
    if max(forecast.peak(EVERYTHING), forecast.peak("none")) <= room.memory:
        return forecast.policies("none")
    found = _Places(forecast, room, linear).best()
    if found is None and waits and room.bytes_per_flop < math.inf:
        # Slow is better than out of memory.
        found = _Places(forecast, dataclasses.replace(room, bytes_per_flop=math.inf), linear).best()
    return found


@dataclasses.dataclass
class _Places:
    """A search for the policies of all blocks of one model on one size of inputs."""

    forecast: Forecast
    room: Room
    linear: bool

    def __post_init__(self) -> None:
        self.step, self.listed = self.forecast.full, self.forecast.ranked(self.linear)
        self.blocks = list(self.forecast.candidates)

    def leaves_in_time(self, policies: Policies) -> bool:
        """Whether the host has room for what leaves the device, and the bus hides its copies."""
        host = self.step.host_bytes(policies)
        return not host or (host <= self.room.host and self.step.bytes_per_flop(policies) <= self.room.bytes_per_flop)

    def fits(self, policies: Policies) -> bool:
        """Whether a step under these policies fits the room."""
        return self.forecast.peak(policies) <= self.room.memory and self.leaves_in_time(policies)

    def cost(self, policies: Policies | None) -> tuple[float, int]:
        """FLOPs that run again, and bytes on the host."""
        return (self.step.recomputed(policies), self.step.host_bytes(policies)) if policies else (math.inf, 0)

    def best(self) -> dict[str, Policy] | None:
        """The best policies that are found, or policies by name if those are better; None if none fit."""
        choices = [self.forecast.policies(policy) for policy in ROWS.values() if policy.checkpoints]
        number = self.best_number() if self.room.host else 0
        nearby = range(max(0, number - 1), number + 1 + bool(self.room.host))
        choices += [self.leaving(near, filled) or {} for near in nearby]
        return min((choice for choice in choices if choice and self.fits(choice)), key=self.cost, default=None)

    def best_number(self) -> int:
        """How many blocks leave at best: every few numbers are tried, and ever smaller steps around the best."""
        cost = functools.cache(lambda number: self.cost(self.leaving(number, longest)))
        numbers = range(1, len(self.blocks))
        most = bisect.bisect_left(
            numbers, True, key=lambda number: not self.leaves_in_time(self.forecast.saving((), leaving=number))
        )
        step = max(1, most // TRIED)
        best: int = min([*range(0, most, step), most], key=cost)
        while step > 1:
            step = (step + 1) // 2
            best = min([max(0, best - step), best, min(most, best + step)], key=cost)
        return best

    def leaving(self, number: int, choose: Callable[..., list[Output]]) -> dict[str, Policy] | None:
        """The best choice if so many blocks leave; None if none fits. choose: `longest` or `filled`."""

        def fits(chosen: Sequence[Output]) -> bool:
            return self.fits(self.forecast.saving(chosen, leaving=number))

        if not fits(()):
            return None
        leaving = self.blocks[:number]
        chosen: list[Output] = []
        for leaves in (True, False):  # what leaves makes room for what stays
            chosen = choose([out for out in self.listed if (out.block in leaving) == leaves], fits, chosen)
        return self.forecast.saving(chosen, leaving=number)


def warn_of_waiting(forecast: Forecast, room: Room, policies: Policies) -> None:
    """Warn if copies to the host take longer than the computation beside them."""
    if (rate := forecast.full.bytes_per_flop(policies)) > room.bytes_per_flop:
        logger.warning(
            "plan: nothing fits without copies to the host that need %.1f times the rate of the bus: the device will "
            "wait for them",
            rate / room.bytes_per_flop,
        )


def least(forecast: Forecast, room: Room) -> dict[str, Policy]:
    """The policies that hold least on the device."""
    full, leaving = (forecast.policies(Policy("full", offload=offload)) for offload in (False, True))
    return min([full] + [leaving] * (forecast.full.host_bytes(leaving) <= room.host), key=forecast.peak)


def missing(forecast: Forecast, room: Room) -> str:
    """Why nothing fits a room, and what would fit."""
    states, leaving = forecast.states.total, forecast.policies(Policy("full", offload=True))
    peak, peak_leaving = (forecast.peak(choice) - states for choice in (least(forecast, room), leaving))
    host = readable_bytes(forecast.full.host_bytes(leaving))
    # Gradients do not grow with the tokens, and nearly everything else that a step allocates does.
    gradients, there = forecast.gradients, max(0, room.memory - states)
    share = (there - gradients) / max(1, peak - gradients)
    return (
        f"Besides {readable_bytes(states)} of weights and optimizer, " * bool(states)
        + f"a step takes {readable_bytes(peak)} at least"
        + f" ({readable_bytes(peak_leaving)} with {host} of host memory)" * (peak_leaving < peak)
        + f", and {readable_bytes(there)} are there for it. "
        + (f"About {share:.0%} of the tokens would fit" if share > 0.01 else "Not even a few tokens would fit")
        + ": fewer frames, a smaller size or batch, LoRA, or more GPUs that share the weights."
    )
