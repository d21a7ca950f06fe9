"""Moves what a region keeps to host memory between its forward and its recompute.

When a region begins, the region `keep` places before it is offloaded, so that the last ones of a forward stay on the
device. A recompute waits for its own copies back and prefetches those of the region before it in the forward, which
backward needs next. Each thread reloads for itself. Storages move, not tensors: views share one copy.
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
from fastac.engine.transport import PIECE, Copies, Pairs, Transfers, Transport, transport_of
from fastac.errors import FastacError, is_out_of_memory
from fastac.policy import Policy

SMALLEST = 2**21
"""Bytes of a storage below which it stays on the device: the host takes 85 us to begin both of its copies, in which 25
GB/s copy 2.1 MB (benchmarks/region_steps.py)."""


class StashedStorage:
    """A storage that regions keep: its bytes on the device, or on the host."""

    last: weakref.ref[Stash] | None = None
    """The latest region that keeps it. It is offloaded with that one."""
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
        # Its bytes on the device again, by the thread whose recompute holds them and has waited for the copies.
        self.reloads: dict[int, weakref.ref[ReloadedStorage]] = {}
        self.size = storage.nbytes()
        self.transport = transport
        self.transfers = transfers  # of the first region that keeps it
        self._reference = StorageWeakRef(storage)  # no other storage gets the address meanwhile
        transport.storages[self._reference.cdata] = self
        transfers.device_bytes += self.size

    def frees_memory(self, stash: Stash) -> bool:
        """Whether offloading it with a region frees memory of the device."""
        if self.device is None or self.is_common or self.last is not stash.reference:
            return False
        return not torch_private.is_shared(self.device)  # else the user or autograd holds it anyway

    def leave(self, copies: Copies) -> None:
        """Drop the bytes on the device. copies: to the host."""
        del self.transport.storages[self._reference.cdata]
        self.offloaded = copies  # before the bytes go: a thread that sees that reloads them
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
    """A tensor that a region keeps, wherever its storage is."""

    def __init__(self, tensor: torch.Tensor, storage: StashedStorage, version: int) -> None:
        self.storage, self.version = storage, version  # when it was kept
        self.nbytes, self.shape, self.requires_grad = tensor.nbytes, tensor.shape, tensor.requires_grad
        self._counter = torch_private.version_counter(tensor)
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def was_changed(self) -> bool:
        """Whether it was changed in place since it was kept."""
        return self._counter._version != self.version

    def tensor(self, private: bool = False) -> torch.Tensor:
        """The tensor on the device. private: in memory of its own."""
        device = self.storage.device
        if device is None:  # then reloading gives it memory of its own
            private, reloaded = False, self.storage.reloaded()
            if reloaded is None:  # it left after the recompute began
                reloaded = _reload([self.storage], {}, Transfers())[self.storage]
                reloaded.copies.wait()
            device = reloaded.device
        tensor = self._counter.new_empty(0).set_(device.untyped_storage(), *self._layout)
        if private:
            return torch_private.clone(tensor, tensor.stride())
        torch_private.set_version(tensor, self.version)
        return tensor


class _State(threading.local):
    """Regions of this thread."""

    def __init__(self) -> None:
        self.on_device: list[weakref.ref[Stash]] = []  # not offloaded so far, in the order of their forwards
        self.latest: weakref.ref[Stash] | None = None  # whose forward ended last
        self.prefetched: weakref.ref[Stash] | None = None


_state = _State()


class Stash:
    """Everything that one region keeps.

    Args:
        function: that the region runs, for messages.
        state: of its block.
        inputs: of the region, when it begins.

    Raises:
        FastacError: saved_tensors_hooks of the user are open; the host has too little memory.
    """

    def __init__(self, policy: Policy, function: Any, state: BlockState, inputs: Iterable[Any]) -> None:
        if torch_private.saved_tensors_hooks() is not None:
            raise FastacError(
                f"{policy}: {describe(function)} runs under saved_tensors_hooks of yours (save_on_cpu?), which would "
                f"move what offload moves. Leave them out, or leave offload out."
            )
        self.policy, self.block_state = policy, state
        self.reference = weakref.ref(self)
        self.takes_inputs = policy.offloads_inputs and torch_private.innermost_checkpoint() is None
        self.versions = {one: one._version for one in inputs if torch_private.is_plain(one)}
        self.storages: list[StashedStorage] = []
        self.transport: Transport | None = None  # of all of these: tensors on another device stay there
        self.prefetched: dict[int, Reloaded] = {}  # for a recompute, by the thread that began it
        self.previous: weakref.ref[Stash] | None = None  # of the region before this one in the forward
        self.transfers = state.transfers = Transfers()
        _state.on_device = [one for one in _state.on_device if one() is not None]
        while len(_state.on_device) >= policy.keep:
            earlier = _state.on_device.pop(0)()
            if earlier is not None:
                earlier.offload()

    def take_input(self, value: Any) -> Any:
        """Keep an input of the region. Returns a StashedTensor, or the input itself if it cannot move."""
        return self.take(value, self.versions[value], True) if torch_private.is_plain(value) else value

    def take(self, tensor: torch.Tensor, version: int, is_input: bool = False) -> Any:
        """Keep a tensor. Returns a StashedTensor, or the tensor itself if it cannot move."""
        transport, untyped = transport_of(tensor.device), tensor.untyped_storage()
        self.transport = self.transport or transport
        if transport is None or transport is not self.transport or untyped.nbytes() < SMALLEST:
            return tensor
        storage = transport.storages.get(torch_private.memory(tensor))
        if storage is None:
            storage = StashedStorage(untyped, transport, self.transfers)
        storage.last = self.reference
        if is_input:
            storage.is_common |= storage.input_of not in (None, self.reference)
            storage.input_of = self.reference
        if storage not in self.storages:
            self.storages.append(storage)
        return StashedTensor(tensor, storage, version)

    def end_forward(self) -> None:
        """The forward has ended, and `keep` was called for everything that the region keeps."""
        self.versions = {}
        self.previous, _state.latest = _state.latest, self.reference
        _state.on_device.append(self.reference)

    def offload(self) -> None:
        """Begin to copy to the host what frees memory of the device. Raises FastacError if the host has too little."""
        storages = [one for one in self.storages if one.frees_memory(self)]
        blocks = max(1, self.block_state.offloading - self.policy.keep)
        host_memory.check_available(blocks * sum(one.size for one in storages), blocks, self.policy)
        try:
            pairs = [pair for one in storages if one.device is not None for pair in one.pairs(one.device)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = sum(one.size for one in storages)
            raise host_memory.exhausted(size, self.block_state.name or "a block", self.policy, error) from error
        if self.transport is not None and pairs:
            copies = self.transport.begin(pairs, True, (), self.transfers)
            for one in storages:  # no sooner: allocating host memory may fail
                one.leave(copies)
                one.transfers.device_bytes -= one.size
                self.transfers.host_bytes += one.size

    def reload(self) -> Reloaded:
        """A recompute begins: wait for its copies, and prefetch for the region that backward needs next.

        Returns what the recompute needs on the device: hold it until it ends.
        """
        if self.transport is not None:
            self.transport.release()
        thread = threading.get_ident()
        if _state.prefetched is not None and (prefetched := _state.prefetched()) not in (None, self):
            prefetched.prefetched.pop(thread, None)  # backward came to another region: hold one prefetched at most
        reloaded = _reload(self.storages, self.prefetched.pop(thread, {}), self.transfers)
        for copies in {one.copies for one in reloaded.values()}:
            copies.wait()
        for storage, one in reloaded.items():
            storage.reloads[thread] = weakref.ref(one)
        if self.previous is not None and (previous := self.previous()) is not None:
            _state.prefetched = self.previous
            previous.prefetched[thread] = _reload(previous.storages, {}, previous.transfers)
        return reloaded


def _reload(storages: Sequence[StashedStorage], prefetched: Reloaded, transfers: Transfers) -> Reloaded:
    """Begin to copy back those that are on the host alone. Returns all that were offloaded."""
    found: dict[StashedStorage, Any] = {
        one: one.reloaded() or prefetched.get(one) for one in storages if one.device is None
    }
    away = [one for one, again in found.items() if again is None]
    if away:
        devices = [away[0].transport.device_memory(one.size) for one in away]
        pairs = [pair for one, device in zip(away, devices, strict=True) for pair in one.pairs(device)]
        copies = away[0].transport.begin(pairs, False, [one.offloaded for one in away if one.offloaded], transfers)
        found |= {one: ReloadedStorage(device, copies) for one, device in zip(away, devices, strict=True)}
    return found


def unpack_input(kept: StashedTensor) -> torch.Tensor:
    """An input of a region. Raises FastacError if it was changed in place since it was kept, as autograd does."""
    if kept.was_changed:
        raise FastacError(
            f"an input {tuple(kept.shape)} of a checkpointed block was changed in place after it was saved, so "
            f"recompute cannot use it. Replace the in-place operation."
        )
    return kept.tensor()


def unpack_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a region, with tensors for the KeptTensors among them."""
    return {
        name: unpack_input(value).requires_grad_(value.requires_grad) if isinstance(value, StashedTensor) else value
        for name, value in values.items()
    }
