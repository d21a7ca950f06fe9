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
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from fastac.errors import readable_bytes
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.ranking import Output, filled, longest, ranked
from fastac.planning.timeline import Policies
from fastac.policy import Policy

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


def choose(
    forecast: Forecast, room: Room, *, linear: bool = True, gradient_shards: int | None = None
) -> dict[str, Policy] | None:
    """The policies of all blocks that avoid the most recompute in a room; None if no policies fit.

    If nothing fits otherwise, copies to the host may take longer than the computation beside them.

    Args:
        linear: whether outputs of Linear modules may be saved.
        gradient_shards: by default the number of GPUs; a large number if the gradients are allocated already.
    """
    search = _Search(forecast, room, linear, gradient_shards or forecast.gpus)
    # Without checkpointing nothing is run again either, and nothing has to be stored and put back. It holds more than
    # all outputs that could be saved.
    if search.peak(EVERYTHING) <= room.memory and search.peak("none") <= room.memory:
        return forecast.policies("none")
    found = search.best()
    if found is None and room.bytes_per_flop < math.inf:
        search.room = replace(room, bytes_per_flop=math.inf)  # slow is better than out of memory
        found = search.best()
    return found


class _Search:
    """A search for the policies of all blocks of one model on one size of inputs."""

    def __init__(self, forecast: Forecast, room: Room, linear: bool, gradient_shards: int) -> None:
        self.forecast, self.room, self.gradient_shards, self.step = forecast, room, gradient_shards, forecast.full
        outputs = forecast.outputs(linear)
        self.blocks, self.listed = list(outputs), ranked(outputs)

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
        policies = self.forecast.saving(chosen)
        on_host = {block: replace(policies[block], offload=True, keep=1) for block in self.blocks[:leaving]}
        return policies | on_host

    def best(self) -> dict[str, Policy] | None:
        """The best policies that are found, or a policy by name if that is better; None if none fits."""

        @functools.cache
        def cost(leaving: int) -> tuple[float, int]:
            chosen = self.leaving(leaving, longest)
            return self.cost(chosen) if chosen else (math.inf, 0)

        numbers = range(1, len(self.blocks))
        most = bisect.bisect_left(numbers, True, key=lambda leaving: not self.leaves_in_time(self.policies((), leaving)))
        stride = max(1, most // TRIED)
        nearest = min([*range(0, most, stride), most], key=cost)
        while stride > 1:
            stride = (stride + 1) // 2
            nearest = min((number for number in (nearest - stride, nearest, nearest + stride) if 0 <= number <= most), key=cost)
        choices = [self.forecast.policies(policy) for policy in ROWS.values() if policy.checkpoints]
        choices = [*filter(self.fits, choices), self.leaving(nearest, filled)]
        return min(filter(None, choices), key=self.cost, default=None)

    def leaving(self, number: int, choose: Callable[..., list[Output]]) -> dict[str, Policy] | None:
        """The best choice if so many blocks leave; None if none fits. choose: a function of `ranking`."""

        def fits(chosen: Iterable[Output]) -> bool:
            return self.fits(self.policies(chosen, number))

        if not fits(()):
            return None
        leaving, chosen = self.blocks[:number], []
        for leaves in (True, False):
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
