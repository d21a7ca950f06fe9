"""Copies between a device and the host, beside what is computed, and what holds memory until they are done.

Each direction has a stream. What copies read and write is held until they are done, and the host waits for none of
them: where one has to be done first, the stream that computes waits for its event.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastac.engine.calls import Transfers

PIECE = 2**26
"""Bytes that are copied at once: torch's allocator of pinned memory rounds each piece up to a power of two."""

IN_FLIGHT = 2
"""Regions whose copies to the host are in flight at one time. Before those of one more, computation waits."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Bytes on the device and on the host."""


class Transport:
    """Copies between a device and host memory that are done at once: of a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
        self._running: list[Copies] = []
        self._lock = threading.Lock()  # forward and backward are different threads

    def host_memory(self, size: int) -> torch.Tensor:
        """So many bytes on the host."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def device_memory(self, size: int) -> torch.Tensor:
        """So many bytes on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: Pairs, to_host: bool, after: Iterable[Any]) -> Any:
        """Begin copies, after what is computed so far and after some events. Returns the event of their end."""
        for device, host in pairs:
            host.copy_(device) if to_host else device.copy_(host)

    def wait(self, event: Any) -> Any:
        """Let what is computed next wait for an event. Returns what `had_to_wait` takes."""

    def had_to_wait(self, waiting: Any) -> bool:
        """Whether the device was idle in a `wait`."""
        return True

    def is_done(self, event: Any) -> bool:
        """Whether the copies of an event are done."""
        return True

    def begin(self, pairs: Pairs, to_host: bool, after: Sequence[Copies], transfers: Transfers) -> Copies:
        """Begin the copies of a region in one direction."""
        self.release()
        in_flight = [one for one in self._running if one.to_host and one.device]
        for earlier in in_flight[: len(in_flight) + 1 - IN_FLIGHT] if to_host else ():
            earlier.wait()
        event = self.copy(pairs, to_host, [one.event for one in after])
        copies = Copies(self, to_host, [one for one, _ in pairs], [one for _, one in pairs], after, transfers, event)
        with self._lock:
            self._running.append(copies)
        self.release()
        return copies

    def release(self) -> None:
        """Hold no longer what copies used that are done."""
        with self._lock:
            done = [one for one in self._running if self.is_done(one.event)]
            self._running = [one for one in self._running if one not in done]
        for one in done:
            one.device = []


class StreamTransport(Transport):
    """Copies beside what is computed, of an accelerator, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = {to_host: torch.Stream(device) for to_host in (True, False)}

    def host_memory(self, size: int) -> torch.Tensor:
        """So many bytes of pinned memory, which torch hands out again once they are free."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pairs: Pairs, to_host: bool, after: Iterable[Any]) -> Any:
        """Let the stream of the direction copy."""
        stream = self._streams[to_host]
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with self._lock, stream:  # a stream that two threads enter at once raises
            for device, host in pairs:
                host.copy_(device, non_blocking=True) if to_host else device.copy_(host, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> Any:
        """Let the current stream wait. Returns events before and behind that."""
        stream = torch.accelerator.current_stream(self.device)
        before, behind = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        behind.record(stream)
        return before, behind

    def had_to_wait(self, waiting: Any) -> bool:
        """Whether there was time between the events, as there is also where the host is late. Waits for them."""
        before, behind = waiting
        behind.synchronize()
        return bool(before.elapsed_time(behind) > 0.02)  # ms. Two events without a wait are some us apart.

    def is_done(self, event: Any) -> bool:
        """Whether the event was reached."""
        return bool(event.query())


@functools.cache
def transport_of(device: torch.device) -> Transport | None:
    """How tensors get from a device to the host; None for those of the host itself, where there is a device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type == "cpu":
        return Transport(device) if accelerator is None else None
    has_streams = accelerator is not None and device.type == accelerator.type
    return StreamTransport(device) if has_streams else Transport(device)


@dataclasses.dataclass(eq=False)
class Copies:
    """Copies in one direction that were begun together. What they read and write is held until they are done."""

    transport: Transport
    to_host: bool
    device: list[torch.Tensor]
    host: list[torch.Tensor]
    after: Sequence[Copies]
    transfers: Transfers
    event: Any

    def __post_init__(self) -> None:
        self.transfers.copies += 1

    def wait(self) -> None:
        """Let what is computed next find the copies done. It may use memory of the device that they used."""
        self.transfers.waits.append((self.transport, self.transport.wait(self.event), sum(map(len, self.host))))
        for copies in (self, *self.after):
            copies.device = []
        self.after = ()
