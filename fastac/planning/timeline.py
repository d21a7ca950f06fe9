"""Every allocation of a step, in order, and the bytes that any policy holds at each moment of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastac.engine import offload
from fastac.policy import Policy

if TYPE_CHECKING:
    import numpy as np

Place = tuple[str, int]
"""A region, and the index of one of its candidates. A region is named as its block; a second call of it has "#2"."""

Policies = Mapping[str, Policy]
"""Policy of every block, by the block's name."""

EXCHANGED = "exchanged"
"""Name of the candidates that are outputs of collectives. Under a `Split`, one stands for those of an attention."""


@dataclasses.dataclass
class Candidate:
    """One output of a block that could be saved instead of recomputed."""

    # Name of the Linear module in its block, or of the attention op; "" if the output cannot be saved.
    name: str
    # What a policy that saves it adds to the bytes of full checkpointing, from the forward to recompute.
    bytes: int = 0
    # FLOPs of its recompute; 0 if recompute ends before it.
    flops: int = 0
    # Number of keys that an attention call attends to; 0 for a Linear module.
    keys: int = 0


@dataclasses.dataclass
class Event:
    """One allocation, or one release (then bytes are below 0)."""

    bytes: int
    candidate: Place | None = None
    # Added to `bytes` if the candidate is saved: the forward does not release it, recompute does not allocate it.
    change: int = 0
    # Whether the storage is the gradient of a parameter.
    gradient: bool = False
    # The allocation that a release ends, if it was recorded.
    ends: Event | None = dataclasses.field(default=None, compare=False, repr=False)


class Moment(NamedTuple):
    """The index of an event without bytes, and the FLOPs of the step before it."""

    event: int
    flops: int


@dataclasses.dataclass
class HeldStorage:
    """A storage that regions hold from forward to recompute: as an input, or as part of a saved candidate."""

    bytes: int
    inputs_of: list[str] = dataclasses.field(default_factory=list)
    candidate: Place | None = None


class HostCopy(NamedTuple):
    """Bytes of one region that are only on the host from `left` to `returns`."""

    region: str
    bytes: int
    # Copies to the host begin, and have ended.
    leaves: Moment
    left: Moment
    # Copies back to the device begin, and have ended.
    returns: Moment
    returned: Moment


def block_name(region: str) -> str:
    """The name of the block that a region is a call of."""
    return region.partition("#")[0]


def _is_saved(policy: Policy, candidate: Candidate) -> bool:
    if candidate.keys:
        return policy.saves(candidate.keys)
    if candidate.name == EXCHANGED:
        return policy.saves_collectives
    return bool(candidate.name) and policy.saves_linear(candidate.name)


@dataclasses.dataclass
class Timeline:
    """One simulated step: its FLOPs and the bytes that it allocates (gradients, but no weights), under any policies."""

    events: Sequence[Event]
    # Number of events in the forward. The last of them has no bytes.
    forward_ends: int
    # FLOPs of each phase: forward, recompute, backward.
    flops: Counter[str]
    # Region -> its candidates, in the order of the calls.
    candidates: Mapping[str, Sequence[Candidate]]
    # Region -> when its forward begins, and when its recompute begins if there is one.
    begins: Mapping[str, Sequence[Moment]]
    storages: Sequence[HeldStorage]

    def __post_init__(self) -> None:
        import numpy as np  # not before a plan: the rest of fastac needs none

        # A plan asks for the peak of hundreds of policies. So candidates are numbered and events become arrays: the
        # bytes of event i are _bytes[i], and _change[i] on top if the candidate with the number _owner[i] is saved.
        places = ((region, index) for region, listed in self.candidates.items() for index in range(len(listed)))
        self._numbers: dict[Place | None, int] = {place: number for number, place in enumerate(places)}
        # One element more than there are candidates: -1, the owner of events without a candidate, is never saved.
        self._unsaved = np.zeros(len(self._numbers) + 1, np.int64)
        self._bytes = np.array([event.bytes for event in self.events], np.int64)
        self._gradients = np.array([event.bytes * event.gradient for event in self.events], np.int64)
        self._change = np.array([event.change for event in self.events], np.int64)
        self._owner = np.array([self._numbers.get(event.candidate, -1) for event in self.events], np.int64)
        self._saved: dict[tuple[str, Policy], dict[Place, Candidate]] = {}
        # The copies of the latest policies.
        self._copied: tuple[Policies, list[HostCopy]] | None = None

    def saved(self, policies: Policies) -> dict[Place, Candidate]:
        """The candidates that policies save."""
        saved: dict[Place, Candidate] = {}
        for region, candidates in self.candidates.items():
            if candidates:  # a UNet runs parts of its blocks: the blocks have none, and no policy
                policy = policies[block_name(region)]
                if (region, policy) not in self._saved:  # hundreds of mixtures of a few policies are asked for
                    numbered = enumerate(candidates)
                    of_region = {(region, index): out for index, out in numbered if _is_saved(policy, out)}
                    self._saved[region, policy] = of_region
                saved |= self._saved[region, policy]
        return saved

    def saved_bytes(self, policies: Policies) -> int:
        """Bytes of the candidates that policies save."""
        return sum(candidate.bytes for candidate in self.saved(policies).values())

    def held(self, policies: Policies) -> int:
        """Bytes alive between forward and backward, on the device."""
        return int(self._deltas(policies, 1)[: self.forward_ends].sum())

    def peak(self, policies: Policies, gradient_shards: int = 1) -> int:
        """The most bytes alive at one time. gradient_shards: GPUs that share the gradients of parameters."""
        return int(self.alive(policies, gradient_shards).max(initial=0))

    def alive(self, policies: Policies, gradient_shards: int = 1) -> np.ndarray:
        """The bytes alive after each event."""
        return self._deltas(policies, gradient_shards).cumsum()

    def added(self, places: Iterable[Place]) -> np.ndarray:
        """By how many bytes each event changes what saved candidates add to full checkpointing."""
        is_saved = self._unsaved.copy()
        is_saved[[self._numbers[place] for place in places]] = 1
        added: np.ndarray = self._change * is_saved[self._owner]
        return added

    def recomputed(self, policies: Policies) -> int:
        """FLOPs of recompute."""
        return self.flops["recompute"] - sum(candidate.flops for candidate in self.saved(policies).values())

    def host_copies(self, policies: Policies) -> list[HostCopy]:
        """Copies to host memory and back, one entry for each region that offloads, as `fastac.engine.offload` does it.

        When a region begins, the region `keep` places before it starts to copy to the host. A copy is assumed to end
        when the next region begins, or the forward ends. A region returns while the region after it is recomputed. A
        storage leaves with the last region that holds it. It stays if one of these regions does not offload it.
        """
        # A search asks for the peak of policies, and then for what these copies take.
        if self._copied is None or self._copied[0] != policies:
            self._copied = dict(policies), self._host_copies(policies)
        return self._copied[1]

    def _host_copies(self, policies: Policies) -> list[HostCopy]:
        policy = {region: policies[block_name(region)] for region in self.begins}
        regions = [region for region in self.begins if policy[region].checkpoints]
        # A region that begins only once is not recomputed: it holds nothing that could leave.
        order = [region for region in regions if len(self.begins[region]) > 1]
        numbers = {region: number for number, region in enumerate(order)}
        saved, sizes = self.saved(policies), Counter[int]()
        for storage in self.storages:
            # The engine leaves inputs of several regions, and small storages, where they are.
            stays = len(storage.inputs_of) > 1 or storage.bytes < offload.SMALLEST
            if stays or not (storage.inputs_of or storage.candidate in saved):
                continue
            # Number of each region that holds the storage -> whether it offloads it. -1: it offloads nothing.
            leaves_with = {numbers.get(region, -1): policy[region].offloads_inputs for region in storage.inputs_of}
            if storage.candidate in saved:
                region, _ = storage.candidate
                leaves_with[numbers.get(region, -1)] = policy[region].offloads_outputs
            if all(leaves_with.values()):
                sizes[max(leaves_with)] += storage.bytes
        forwards = [self.begins[region][0] for region in regions]
        forwards.append(Moment(self.forward_ends - 1, self.flops["forward"]))
        copies = []
        for number, region in enumerate(regions):
            leaves, size = number + policy[region].keep, sizes[numbers[region]] if region in numbers else 0
            if size and leaves + 1 < len(forwards):
                # The next region need not be recomputed right before this one: backward may take another order.
                recomputes = [self.begins[later][1] for later in order[numbers[region] :][:2]]
                returns = min(recomputes, key=lambda moment: moment.event)
                copies.append(HostCopy(region, size, forwards[leaves], forwards[leaves + 1], returns, recomputes[0]))
        return copies

    def host_bytes(self, policies: Policies) -> int:
        """Bytes that wait on the host between forward and backward."""
        return sum(host_copy.bytes for host_copy in self.host_copies(policies))

    def bytes_per_flop(self, policies: Policies) -> float:
        """The most bytes that are copied in one direction per FLOP that runs meanwhile."""
        saved = self.saved(policies)

        def between(first: Moment, last: Moment) -> int:
            recomputed = {
                region for region, begins in self.begins.items() if first.event <= begins[-1].event < last.event
            }
            # The simulation recomputed everything: what these regions replay takes no time that could hide a copy.
            replayed = sum(candidate.flops for (region, _), candidate in saved.items() if region in recomputed)
            return max(1, last.flops - first.flops - replayed)

        rates = [
            copied.bytes / min(between(copied.leaves, copied.left), between(copied.returns, copied.returned))
            for copied in self.host_copies(policies)
        ]
        return max(rates, default=0.0)

    def _deltas(self, policies: Policies, gradient_shards: int) -> np.ndarray:
        """By how many bytes each event changes what is alive on the device."""
        deltas: np.ndarray = self._bytes + self.added(self.saved(policies))
        if gradient_shards > 1:
            deltas += self._gradients // gradient_shards - self._gradients
        for host_copy in self.host_copies(policies):
            deltas[host_copy.left.event] -= host_copy.bytes
            deltas[host_copy.returns.event] += host_copy.bytes
        return deltas
