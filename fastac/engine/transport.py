"""Copies between a device and the host, in parallel with computation.

Each direction has a stream. Memory that a copy reads or writes is held until the copy is done: torch's allocator does
not know that another stream uses it (pytorch#106360). The host waits for no copy: if a copy has to be done first, the
computing stream waits for its event.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastac.engine.results import Transfers

PIECE = 2**26
"""Bytes of a piece that is copied at once. torch's allocator of pinned memory rounds each allocation up to a power of
two (pytorch#150517): one large piece could take twice its size. Rounding less is an option of newer torch
(pinned_max_round_threshold_mb), which is the user's to set."""

IN_FLIGHT = 2
"""Regions whose copies to the host may be in flight at one time. Computation waits before it adds another region."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of bytes on the device and their bytes on the host."""


class Transport:
    """Copies between a device and the host.

    Copies of an accelerator use pinned memory, run in parallel with computation, and have an event each. Copies of
    another device are done at once, and have no event.
    """

    def __init__(self, device: torch.device, is_accelerator: bool = False) -> None:
        self.device = device
        self.storages: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
        self.streams = {to_host: torch.Stream(device) for to_host in (True, False)} if is_accelerator else {}
        self._running: list[Copies] = []
        # The forward of one region and the backward of another may run in different threads.
        self._lock = threading.Lock()

    def host_memory(self, size: int) -> torch.Tensor:
        """Allocate bytes on the host. torch reuses pinned memory once it is free."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=bool(self.streams))

    def device_memory(self, size: int) -> torch.Tensor:
        """Allocate bytes on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: Pairs, to_host: bool, after: Iterable[Any]) -> Any:
        """Begin copies, after the computation so far and after some events. Returns the event of their end."""
        stream = self.streams.get(to_host)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            for event in after:
                stream.wait_event(event)
        # Under the lock, because a stream that two threads enter at once raises.
        with self._lock, stream or contextlib.nullcontext():
            for device, host in pairs:
                target, source = (host, device) if to_host else (device, host)
                target.copy_(source, non_blocking=stream is not None)
        return None if stream is None else stream.record_event()

    def wait(self, event: Any) -> Any:
        """Let the computation that follows wait for an event. Returns events before and after the wait."""
        if event is None:
            return None
        stream = torch.accelerator.current_stream(self.device)
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        return before, after

    def had_to_wait(self, waiting: Any) -> bool:
        """Whether the device was idle in a `wait`, which returned `waiting`; also if the host was late. Waits."""
        if waiting is None:
            return True
        before, after = waiting
        after.synchronize()
        # In milliseconds. Events without a wait between them are a few microseconds apart.
        return bool(before.elapsed_time(after) > 0.02)

    def is_done(self, event: Any) -> bool:
        """Whether the copies of an event are done."""
        return event is None or bool(event.query())

    def bytes_per_second(self) -> float:
        """The rate of copies in the slower direction, measured. Waits for the device."""
        pairs = [(self.device_memory(PIECE), self.host_memory(PIECE))]
        rates = []
        # The first copy in each direction touches memory for the first time.
        for to_host in (True, False, True, False):
            self._synchronize()
            start = time.perf_counter()
            self.copy(pairs, to_host, ())
            self._synchronize()
            rates.append(PIECE / (time.perf_counter() - start))
        return min(rates[2:])

    def _synchronize(self) -> None:
        if self.streams:
            torch.accelerator.synchronize(self.device)

    def begin(self, pairs: Pairs, to_host: bool, after: Sequence[Copies], transfers: Transfers) -> Copies:
        """Begin the copies of a region in one direction."""
        self.release()
        # Memory is held until its copy is done. If computation ran far ahead of the copies, nothing would be freed.
        in_flight = [copies for copies in self._running if copies.to_host and copies.device]
        for earlier in in_flight[: len(in_flight) + 1 - IN_FLIGHT] if to_host else ():
            earlier.wait()
        event = self.copy(pairs, to_host, [copies.event for copies in after])
        device, host = [device for device, _ in pairs], [host for _, host in pairs]
        copies = Copies(self, to_host, device, host, after, transfers, event)
        with self._lock:
            self._running.append(copies)
        self.release()
        return copies

    def release(self) -> None:
        """Drop the memory of copies that are done."""
        with self._lock:
            done = [copies for copies in self._running if self.is_done(copies.event)]
            self._running = [copies for copies in self._running if copies not in done]
        for copies in done:
            copies.device = []


@functools.cache
def transport_of(device: torch.device) -> Transport | None:
    """The transport of tensors on a device; None for the CPU if there is an accelerator."""
    # Without an accelerator the CPU counts as a device, so that tests of offload run there.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type == "cpu" and accelerator is not None:
        return None
    return Transport(device, is_accelerator=accelerator is not None and device.type == accelerator.type)


@functools.cache
def bus_rate(device: torch.device) -> float:
    """Bytes per second between a device and the host, in the slower direction. Measured once in a process."""
    transport = transport_of(device)
    return 0.0 if transport is None else transport.bytes_per_second()


@dataclasses.dataclass(eq=False)
class Copies:
    """Copies of one region in one direction."""

    transport: Transport
    to_host: bool
    # Memory that they read or write. It is held until they are done.
    device: list[torch.Tensor]
    host: list[torch.Tensor]
    # Copies that are done before these begin.
    after: Sequence[Copies]
    transfers: Transfers
    # The event of their end.
    event: Any

    def __post_init__(self) -> None:
        self.transfers.copies += 1

    def wait(self) -> None:
        """Let the computation that follows wait for the copies. It may then use their memory on the device."""
        self.transfers.waits.append((self.transport, self.transport.wait(self.event), sum(map(len, self.host))))
        # What computes from now on comes after the copies, so the allocator may reuse their memory.
        for copies in (self, *self.after):
            copies.device = []
        self.after = ()
