"""Moves what a region stores to host memory between its forward and its recompute.

When a region begins, the region `keep` places before it is offloaded, if its policy says so. So the last regions of a
forward stay on the device. A recompute waits until its own copies are back, and prefetches the copies of the region
before it in the forward, which backward needs next. Each thread reloads for itself. Storages move, not tensors: views
share one copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import host_memory, torch_private
from fastac.engine.blocks import BlockState, describe
from fastac.engine.process import thread
from fastac.engine.results import Transfers
from fastac.engine.transport import PIECE, Copies, Pairs, Transport, transport_of
from fastac.errors import FastacError, is_out_of_memory
from fastac.policy import Policy

SMALLEST = 2**21
"""Bytes of a storage below which it stays on the device. The host takes 85 us to begin its two copies
(benchmarks/region_steps.py). In that time 25 GB/s copy 2.1 MB."""


class StashedStorage:
    """A storage that regions hold: its bytes on the device, or on the host."""

    last: weakref.ref[Stash] | None = None
    """The latest region that holds it. It is offloaded with that region."""
    input_of: weakref.ref[Stash] | None = None
    """The latest region whose input it is."""
    is_common = False
    """It is an input of several regions, and stays on the device."""
    offloaded: Copies | None = None
    """The copies to the host."""

    def __init__(self, storage: torch.UntypedStorage, transport: Transport, transfers: Transfers) -> None:
        # Its bytes; None while they are on the host.
        self.device: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host: list[torch.Tensor] = []
        # Its bytes on the device again, by the thread whose recompute holds them and has waited for the copies. Threads
        # do not share them: one thread would free, or still copy, what another thread reads.
        self.reloads: dict[int, weakref.ref[ReloadedStorage]] = {}
        self.size = storage.nbytes()
        self.transport = transport
        # Counters of the first region that holds it.
        self.transfers = transfers
        # While this weak reference lives, no other storage gets the address that is the key in transport.storages.
        self._reference = StorageWeakRef(storage)
        transport.storages[self._reference.cdata] = self
        transfers.device_bytes += self.size

    def frees_memory(self, stash: Stash) -> bool:
        """Whether offloading it with a region frees memory of the device."""
        if self.device is None or self.is_common or self.last is not stash.reference:
            return False
        # If the user or autograd holds the storage as well, it stays on the device anyway.
        return not torch_private.is_shared(self.device)

    def leave(self, copies: Copies) -> None:
        """Drop the bytes on the device. copies: the copies to the host."""
        del self.transport.storages[self._reference.cdata]
        # In this order: a thread that finds no bytes on the device waits for these copies and reloads.
        self.offloaded = copies
        self.device = None
        del self._reference

    def reloaded(self) -> ReloadedStorage | None:
        """Its bytes on the device again, for the recompute that runs in this thread."""
        reload = self.reloads.get(threading.get_ident())
        return None if reload is None else reload()

    def pairs(self, device: torch.Tensor) -> Pairs:
        """Its pieces on a device and on the host. Allocates host memory at the first call."""
        pieces = device.split(PIECE)
        if not self.host:
            self.host = [self.transport.host_memory(len(piece)) for piece in pieces]
        return list(zip(pieces, self.host, strict=True))


class ReloadedStorage:
    """Bytes of a storage on the device again, for one thread. Wait for the copies before you use them."""

    def __init__(self, device: torch.Tensor, copies: Copies) -> None:
        self.device, self.copies = device, copies


Reloaded = dict[StashedStorage, ReloadedStorage]


class StashedTensor:
    """A tensor that a region stores, wherever its storage is."""

    def __init__(self, tensor: torch.Tensor, storage: StashedStorage, version: int) -> None:
        # version: of the moment when the tensor was stored.
        self.storage, self.version = storage, version
        self.nbytes, self.shape, self.requires_grad = tensor.nbytes, tensor.shape, tensor.requires_grad
        self._counter = torch_private.version_counter(tensor)
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def was_changed(self) -> bool:
        """Whether it was changed in place since it was stored."""
        return self._counter._version != self.version

    def tensor(self, private: bool = False) -> torch.Tensor:
        """The tensor on the device. private: in memory that nothing else uses."""
        device = self.storage.device
        if device is None:
            # Reloaded bytes are private anyway.
            private, reloaded = False, self.storage.reloaded()
            if reloaded is None:  # another thread's forward offloaded it after this recompute began
                reloaded = _reload([self.storage], {}, Transfers())[self.storage]
                reloaded.copies.wait()
            device = reloaded.device
        tensor = self._counter.new_empty(0).set_(device.untyped_storage(), *self._layout)
        if private:
            return torch_private.clone(tensor, tensor.stride())
        torch_private.set_version(tensor, self.version)
        return tensor


def begin_region(policy: Policy, function: Any, state: BlockState, inputs: Iterable[Any]) -> Stash | None:
    """The stash of a region that begins, after the regions before it that may leave were offloaded.

    None if it needs no stash: neither it nor a region before it in the same forward offloads. The arguments and errors
    are those of `Stash`.
    """
    # A region leaves when later regions begin, and its copies back begin when the next region is recomputed.
    if not policy.offload and (thread.latest is None or thread.latest() is None):
        return None
    stash = Stash(policy, function, state, inputs)
    earlier = [other for region in thread.on_device if (other := region()) is not None]
    for other in earlier:
        other.later += 1
    thread.on_device = [other.reference for other in earlier if other.later < other.policy.keep]
    for other in earlier:
        if other.later >= other.policy.keep and (thread.measurement is None or thread.measurement.needs_host):
            other.offload()
    return stash


class Stash:
    """Everything that one region may offload.

    Args:
        function: the function that the region runs, for messages.
        state: the state of its block.
        inputs: the region's inputs, when it begins.

    Raises:
        FastacError: saved_tensors_hooks of the user are open; the host has too little memory.
    """

    def __init__(self, policy: Policy, function: Any, state: BlockState, inputs: Iterable[Any]) -> None:
        if policy.offload and torch_private.user_hooks() is not None:
            raise FastacError(
                f"{policy}: {describe(function)} runs under saved_tensors_hooks of yours (save_on_cpu?), which would "
                f"move what offload moves. Leave them out, or leave offload out."
            )
        self.policy, self.block_state = policy, state
        self.reference = weakref.ref(self)
        # Inside another checkpoint inputs are not held: the outer recompute makes them again.
        self.takes_inputs = policy.offloads_inputs and torch_private.innermost_checkpoint() is None
        self.versions = {value: value._version for value in inputs if torch_private.is_plain(value)}
        self.storages: list[StashedStorage] = []
        # The transport of all these storages: a tensor on another device stays there.
        self.transport: Transport | None = None
        # Storages that were reloaded for a recompute to come, by the thread that began to copy them.
        self.prefetched: dict[int, Reloaded] = {}
        # The region before this one in the forward.
        self.previous: weakref.ref[Stash] | None = None
        self.transfers = state.transfers = Transfers()
        # The number of regions that began after this one.
        self.later = 0

    def take_input(self, value: Any) -> Any:
        """Take an input of the region. Returns a StashedTensor, or the input itself if it cannot move."""
        return self.take(value, self.versions[value], True) if torch_private.is_plain(value) else value

    def take(self, tensor: torch.Tensor, version: int, is_input: bool = False) -> Any:
        """Take a tensor. Returns a StashedTensor, or the tensor itself if it cannot move."""
        transport, untyped = transport_of(tensor.device), tensor.untyped_storage()
        self.transport = self.transport or transport
        if transport is None or transport is not self.transport or untyped.nbytes() < SMALLEST:
            return tensor
        storage = transport.storages.get(torch_private.memory(tensor))
        if storage is None:
            storage = StashedStorage(untyped, transport, self.transfers)
        storage.last = self.reference
        if is_input:
            # The text's embedding, say, is an input of every block: offloaded, it would come back for each of them.
            storage.is_common |= storage.input_of not in (None, self.reference)
            storage.input_of = self.reference
        if storage not in self.storages:
            self.storages.append(storage)
        return StashedTensor(tensor, storage, version)

    def end_forward(self) -> None:
        """The forward has ended, and `take` was called for everything that the region may offload."""
        self.versions = {}  # its keys are the inputs, which would stay on the device
        self.previous, thread.latest = thread.latest, self.reference
        thread.on_device.append(self.reference)

    def offload(self) -> None:
        """Begin to copy to the host what frees memory of the device. Raises FastacError if the host has too little."""
        storages = [storage for storage in self.storages if storage.frees_memory(self)]
        blocks = max(1, self.block_state.offloading - self.policy.keep)
        host_memory.check_available(blocks * sum(storage.size for storage in storages), blocks, self.policy)
        try:
            devices = [(storage, storage.device) for storage in storages]
            pairs = [pair for storage, device in devices if device is not None for pair in storage.pairs(device)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = sum(storage.size for storage in storages)
            raise host_memory.exhausted(size, self.block_state.name or "a block", self.policy, error) from error
        if self.transport is not None and pairs:
            copies = self.transport.begin(pairs, True, (), self.transfers)
            # No sooner than here: allocating host memory may fail, and then nothing has moved.
            for storage in storages:
                storage.leave(copies)
                storage.transfers.device_bytes -= storage.size
                self.transfers.host_bytes += storage.size

    def reload(self) -> Reloaded:
        """A recompute begins: wait for its copies, and prefetch for the region that backward needs next.

        Returns the storages that the recompute needs on the device. Hold them until it ends.
        """
        if self.transport is not None:
            self.transport.release()
        ident = threading.get_ident()
        # Backward came to another region than the one that was prefetched: drop that. At most one is held for nothing.
        if thread.prefetched is not None and (prefetched := thread.prefetched()) not in (None, self):
            prefetched.prefetched.pop(ident, None)
        reloaded = _reload(self.storages, self.prefetched.pop(ident, {}), self.transfers)
        for copies in {storage.copies for storage in reloaded.values()}:
            copies.wait()
        for stashed, storage in reloaded.items():
            stashed.reloads[ident] = weakref.ref(storage)
        if self.previous is not None and (previous := self.previous()) is not None:
            thread.prefetched = self.previous
            previous.prefetched[ident] = _reload(previous.storages, {}, previous.transfers)
        return reloaded


def _reload(storages: Sequence[StashedStorage], prefetched: Reloaded, transfers: Transfers) -> Reloaded:
    """Begin to copy back the storages that are only on the host. Returns all storages that were offloaded."""
    reloaded: dict[StashedStorage, Any] = {
        storage: storage.reloaded() or prefetched.get(storage) for storage in storages if storage.device is None
    }
    away = [storage for storage, copy in reloaded.items() if copy is None]
    if away:
        transport = away[0].transport
        devices = [transport.device_memory(storage.size) for storage in away]
        pairs = [pair for storage, device in zip(away, devices, strict=True) for pair in storage.pairs(device)]
        # The copies to the host may still run, in another stream: the host's bytes are complete only after them.
        after = [storage.offloaded for storage in away if storage.offloaded]
        copies = transport.begin(pairs, False, after, transfers)
        reloaded |= {storage: ReloadedStorage(device, copies) for storage, device in zip(away, devices, strict=True)}
    return reloaded


def unpack_input(stashed: StashedTensor) -> torch.Tensor:
    """An input of a region. Raises FastacError if it was changed in place since it was stored, as autograd does."""
    if stashed.was_changed:
        raise FastacError(
            f"an input {tuple(stashed.shape)} of a checkpointed block was changed in place after it was saved, so "
            f"recompute cannot use it. Replace the in-place operation."
        )
    return stashed.tensor()


def unpack_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a region, with tensors for the StashedTensors among them."""
    return {
        name: unpack_input(value).requires_grad_(value.requires_grad) if isinstance(value, StashedTensor) else value
        for name, value in values.items()
    }
