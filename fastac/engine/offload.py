"""What a region keeps, in host memory between its forward and its recompute.

A region that begins sends what the last but `keep` keeps to the host; so the last ones of a forward stay. A recompute
waits for what comes back for it, and begins the copies for the region before it in the forward, which backward wants
next. The unit is a memory (a storage): its views share one copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import host_memory, torch_private
from fastac.engine.blocks import BlockRecord, describe
from fastac.engine.calls import Transfers
from fastac.engine.transport import PIECE, Pairs, Transport, Trip, transport_of
from fastac.errors import FastacError
from fastac.policy import Policy

SMALLEST = 2**21
"""Bytes of a memory below which it stays on the device. The host takes some 60 us to begin both of its copies, in which
25 GB/s copy 1.5 MB (benchmarks/region_steps.py)."""


class Memory:
    """A storage that regions keep: as bytes on the device, or on the host once it has left.

    last: the latest region that keeps it. input_of: the latest whose input it is. is_common: several have it as input.
    transfers: of the first region.
    """

    def __init__(self, storage: torch.UntypedStorage, transport: Transport, transfers: Transfers) -> None:
        self.device: torch.Tensor | None = torch_private.bytes_of(storage)
        self.host: list[torch.Tensor] = []
        self.transport, self.transfers = transport, transfers
        self.last: weakref.ref[Stash] | None = None
        self.input_of: weakref.ref[Stash] | None = None
        self.is_common = False
        self.left: Trip | None = None
        self.arrival: Callable[[], Arrival | None] = lambda: None
        self.size = storage.nbytes()
        self._storage = StorageWeakRef(storage)  # while this is there, no other storage has the address
        transport.memories[self._storage.cdata] = self
        transfers.device_bytes += storage.nbytes()

    def can_leave(self, stash: Stash) -> bool:
        """Whether the device gets room when it leaves with a region."""
        if self.device is None or self.is_common or self.last is not stash.reference:
            return False
        return not torch_private.is_shared(self.device)  # what somebody else holds is there anyway

    def leave(self) -> Pairs:
        """Be held on the host alone. Returns what is to be copied."""
        assert self.device is not None
        device, self.device = self.device, None
        self.host = [self.transport.host_memory(len(piece)) for piece in device.split(PIECE)]
        return self.pairs(device)

    def pairs(self, device: torch.Tensor) -> Pairs:
        """Its pieces, on a device and on the host."""
        return list(zip(device.split(PIECE), self.host, strict=True))


class Arrival:
    """Bytes of a memory on the device again, or on their way there."""

    def __init__(self, device: torch.Tensor, trip: Trip) -> None:
        self.device, self.trip = device, trip


class Kept:
    """A tensor that a region keeps, wherever its memory is. version: of when it was kept."""

    def __init__(self, tensor: torch.Tensor, memory: Memory, version: int) -> None:
        self.memory, self.version = memory, version
        self.nbytes, self.shape, self.requires_grad = tensor.nbytes, tensor.shape, tensor.requires_grad
        self._counter = torch_private.version_counter(tensor)
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def was_changed(self) -> bool:
        """Whether it was changed in place since."""
        return self._counter._version != self.version

    def tensor(self, private: bool = False) -> torch.Tensor:
        """The tensor on the device. private: not in memory that stayed, which others use."""
        device = self.memory.device
        if device is None:
            arrival = self.memory.arrival()
            if arrival is None:  # asked for beside a recompute
                (arrival,) = _bring([self.memory], Transfers())
                arrival.trip.arrive()
            device, private = arrival.device, False
        tensor = self._counter.new_empty(0).set_(device.untyped_storage(), *self._place)
        if private:
            return torch_private.clone(tensor, tensor.stride())
        torch_private.set_version(tensor, self.version)
        return tensor


class _State(threading.local):
    """Regions of this thread that are on the device, the latest, and the one that comes back before its recompute."""

    def __init__(self) -> None:
        self.here: list[weakref.ref[Stash]] = []
        self.latest: weakref.ref[Stash] | None = None
        self.ahead: weakref.ref[Stash] | None = None


_state = _State()


class Stash:
    """What one region keeps. inputs: and their versions when the region began. previous: region in the forward."""

    def __init__(self, policy: Policy, function: Any, record: BlockRecord, inputs: Iterable[Any]) -> None:
        if torch_private.saved_tensors_hooks() is not None:
            raise FastacError(
                f"{policy}: {describe(function)} runs under saved_tensors_hooks of yours (save_on_cpu?), which would "
                f"move what offload moves. Leave them out, or leave offload out."
            )
        self.policy, self.record = policy, record
        self.reference = weakref.ref(self)
        self.takes_inputs = policy.offloads_inputs and torch_private.innermost_checkpoint() is None
        self.inputs = {one: one._version for one in inputs if torch_private.is_plain(one)}
        self.memories: list[Memory] = []
        self.arrivals: list[Arrival] = []
        self.previous: weakref.ref[Stash] | None = None
        self.transfers = record.transfers = Transfers()
        _state.here = [one for one in _state.here if one() is not None]
        while len(_state.here) >= policy.keep:
            earlier = _state.here.pop(0)()
            if earlier is not None:
                earlier.leave()

    def keep_input(self, value: Any) -> Any:
        """What stands for an input of the region; itself where it is no tensor that could leave."""
        return self.keep(value, self.inputs[value], True) if torch_private.is_plain(value) else value

    def keep(self, tensor: torch.Tensor, version: int, is_input: bool = False) -> Any:
        """What stands for a tensor that the region keeps; itself where it cannot leave."""
        transport, storage = transport_of(tensor.device), tensor.untyped_storage()
        if transport is None or storage.nbytes() < SMALLEST:
            return tensor
        memory = transport.memories.get(StorageWeakRef(storage).cdata)
        if memory is None or memory.device is None:
            memory = Memory(storage, transport, self.transfers)
        memory.last = self.reference
        if is_input:
            memory.is_common |= memory.input_of not in (None, self.reference)
            memory.input_of = self.reference
        if memory not in self.memories:
            self.memories.append(memory)
        return Kept(tensor, memory, version)

    def hold(self) -> None:
        """The forward has ended, and all that the region keeps was given to `keep`."""
        self.inputs = {}
        self.previous, _state.latest = _state.latest, self.reference
        _state.here.append(self.reference)

    def leave(self) -> None:
        """Begin to move to the host what the device gets room from. Raises FastacError for too small a host."""
        leaving = [memory for memory in self.memories if memory.can_leave(self)]
        blocks = max(1, self.record.offloading - self.policy.keep)
        host_memory.check(blocks * sum(memory.size for memory in leaving), blocks, self.policy)
        for transport, memories in _by_transport(leaving):
            pairs = [pair for memory in memories for pair in memory.leave()]
            trip = transport.begin(pairs, True, (), self.transfers)
            for memory in memories:
                memory.transfers.device_bytes -= memory.size
                self.transfers.host_bytes += memory.size
                memory.left = trip

    def bring_back(self) -> None:
        """A recompute begins: let it find what has left, and begin the copies that backward wants next."""
        ahead = None if _state.ahead is None else _state.ahead()
        if ahead is not None and ahead is not self:
            ahead.arrivals = []  # it is not what backward wanted next
        for transport, _ in _by_transport(self.memories):
            transport.release()
        self.arrivals = _bring(self.memories, self.transfers)
        for trip in {arrival.trip for arrival in self.arrivals}:
            trip.arrive()
        previous = None if self.previous is None else self.previous()
        if previous is not None:
            _state.ahead = self.previous
            previous.arrivals = _bring(previous.memories, previous.transfers)

    def end_recompute(self) -> None:
        """Hold on the device no more than before it."""
        self.arrivals = []


def _bring(memories: Iterable[Memory], transfers: Transfers) -> list[Arrival]:
    """Begin to move back to the device those of some memories that have left, unless they are under way."""
    memories = list(memories)
    found = [arrival for memory in memories if (arrival := memory.arrival()) is not None]
    for transport, gone in _by_transport(one for one in memories if one.device is None and one.arrival() is None):
        devices = [transport.device_memory(memory.size) for memory in gone]
        pairs = [pair for memory, device in zip(gone, devices, strict=True) for pair in memory.pairs(device)]
        trip = transport.begin(pairs, False, [memory.left for memory in gone if memory.left is not None], transfers)
        for memory, device in zip(gone, devices, strict=True):
            found.append(Arrival(device, trip))
            memory.arrival = weakref.ref(found[-1])
    return found


def _by_transport(memories: Iterable[Memory]) -> Iterable[tuple[Transport, list[Memory]]]:
    groups: dict[Transport, list[Memory]] = {}
    for memory in memories:
        groups.setdefault(memory.transport, []).append(memory)
    return groups.items()


def unpack_input(kept: Kept) -> torch.Tensor:
    """An input of a region. Raises FastacError where it was changed in place since, as autograd does."""
    if kept.was_changed:
        raise FastacError(
            f"an input {tuple(kept.shape)} of a checkpointed block was changed in place after it was saved, so "
            f"recompute cannot use it. Replace the in-place operation."
        )
    return kept.tensor()


def restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments, with the tensors that were kept among them."""
    return {
        name: unpack_input(value).requires_grad_(value.requires_grad) if isinstance(value, Kept) else value
        for name, value in values.items()
    }
