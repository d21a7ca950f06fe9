"""Three places for what a block could save: it is run again, stays on the device, or waits on the host.

The first blocks of a model wait on the host: backward needs them last, so their copies free memory for the longest
time. The other blocks stay on the device. So a choice is a number of blocks that leave, outputs of these within the
memory of the host and the rate of its bus, and outputs of the other blocks within the memory of the device: both by
`ranking`. One simulated step gives the bytes that are alive at every moment, under any choice.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from fastac.errors import readable_bytes
from fastac.planning.forecast import ROWS, Forecast, policy_of
from fastac.planning.ranking import Output, filled, longest, marks_of, ranked
from fastac.planning.timeline import Policies
from fastac.policy import Policy

TRIED = 8
"""So many numbers of blocks that leave are tried first, and then numbers around the best of them."""

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
    if search.peak(EVERYTHING) <= room.memory and search.peak("none") <= room.memory:
        return forecast.policies("none")
    found = search.best()
    if found is None and room.bytes_per_flop < math.inf:
        search.room = replace(room, bytes_per_flop=math.inf)  # slow is better than out of memory
        found = search.best()
    return found


class _Places:
    """A search for the policies of all blocks of one model on one size of inputs."""

    def __init__(self, forecast: Forecast, room: Room, linear: bool, gradient_shards: int) -> None:
        self.forecast, self.room, self.gradient_shards, self.step = forecast, room, gradient_shards, forecast.full
        self.candidates, self.listed = forecast.candidates(), ranked(forecast.outputs(linear))
        self.blocks = list(self.candidates)
        self.policy = functools.cache(self._policy)  # hundreds of mixtures of a few policies are tried

    def peak(self, policy: str | Policy) -> int:
        """The peak of a step under one policy for all blocks."""
        return self.forecast.step(policy).peak(self.forecast.policies(policy), self.gradient_shards)

    def leaves_in_time(self, policies: Policies) -> bool:
        """Whether the host has room for what leaves the device, and the bus hides its copies."""
        host = self.step.host_bytes(policies)
        return not host or (host <= self.room.host and self.step.bytes_per_flop(policies) <= self.room.bytes_per_flop)

    def fits(self, policies: Policies) -> bool:
        """Whether a step under these policies fits the room."""
        return self.step.peak(policies, self.gradient_shards) <= self.room.memory and self.leaves_in_time(policies)

    def cost(self, policies: Policies) -> tuple[float, int]:
        """FLOPs that run again, and bytes on the host."""
        return self.step.recomputed(policies), self.step.host_bytes(policies)

    def policies(self, chosen: Iterable[Output], leaving: int) -> dict[str, Policy]:
        """The policies that save these outputs. leaving: so many blocks, the first, wait on the host."""
        marks = marks_of(chosen)
        return {
            block: self.policy(block, frozenset(marks[block]), number < leaving)
            for number, block in enumerate(self.blocks)
        }

    def _policy(self, block: str, marks: frozenset[str | int], leaves: bool) -> Policy:
        policy = policy_of(marks, self.candidates[block])
        return replace(policy, offload=True, keep=1) if leaves else policy

    def best(self) -> dict[str, Policy] | None:
        """The best policies that are found, or policies by name if those are better; None if none fit."""
        choices = [self.forecast.policies(policy) for policy in ROWS.values() if policy.checkpoints]
        number = self.best_number() if self.room.host else 0
        nearby = range(max(0, number - 1), number + 1 + bool(self.room.host))
        choices += [self.leaving(near, filled) or {} for near in nearby]
        return min((choice for choice in choices if choice and self.fits(choice)), key=self.cost, default=None)

    def best_number(self) -> int:
        """How many blocks leave at best: every few numbers are tried, and ever smaller steps around the best."""

        @functools.cache
        def cost(number: int) -> tuple[float, int]:
            choice = self.leaving(number, longest)
            return self.cost(choice) if choice else (math.inf, 0)

        most = bisect.bisect_left(
            range(1, len(self.blocks)), True, key=lambda number: not self.leaves_in_time(self.policies((), number))
        )
        step = max(1, most // TRIED)
        best: int = min([*range(0, most, step), most], key=cost)
        while step > 1:
            step = (step + 1) // 2
            best = min([max(0, best - step), best, min(most, best + step)], key=cost)
        return best

    def leaving(self, number: int, choose: Callable[..., list[Output]]) -> dict[str, Policy] | None:
        """The best choice if so many blocks leave; None if none fits. choose: a function of `ranking`."""

        def fits(chosen: Iterable[Output]) -> bool:
            return self.fits(self.policies(chosen, number))

        if not fits(()):
            return None
        leaving = self.blocks[:number]
        chosen: list[Output] = []
        for leaves in (True, False):  # what leaves makes room for what stays
            chosen = choose([out for out in self.listed if (out.block in leaving) == leaves], fits, chosen)
        return self.policies(chosen, number)


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
