"""A device whose copies are late, on a CPU: what offload has to wait for and to hold shows as wrong bytes.

A copy is done when something waits for it, no sooner. If what it reads was freed by then, or written, it reads NaN; if
what it writes was freed, that is noted; a destination holds NaN until it is written. Host memory is reused at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import offload, torch_private
from fastac.engine.transport import Pairs, Transport

NAN = 0xFF  # as each byte of a number of any floating-point type


class Bytes:
    """A view of bytes, by a weak reference to their storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._part = tensor.storage_offset(), tensor.shape
        self.then = tensor.clone()

    def now(self) -> torch.Tensor | None:
        """The tensor; None where it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[attr-defined]
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, *self._part)


@dataclasses.dataclass
class Copy:
    """Copies that were begun, in one stream."""

    pairs: list[tuple[Bytes, Bytes]]
    to_host: bool
    after: list[Copy]
    began: int
    is_done: bool = False


class Simulated(Transport):
    """A device, and what its tests look at.

    late: copies are done when they are waited for; else at once.
    in_use: bytes of host memory, allocated: ever. lasted: of each copy, by the clock that a test gives it.
    """

    def __init__(self, device: torch.device = torch.device("cpu"), late: bool = True) -> None:  # noqa: B008
        super().__init__(device)
        self.late = late
        self._one_at_a_time = threading.RLock()
        self.faults: list[str] = []
        self.in_use = self.allocated = 0
        self.clock: Callable[[], int] = lambda: 0
        self.lasted: list[int] = []
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self._streams: dict[bool, list[Copy]] = {True: [], False: []}

    def host_memory(self, size: int) -> torch.Tensor:
        self.allocated += 0 if self._free[size] else size
        memory = self._free[size].pop() if self._free[size] else np.full(size, NAN, np.uint8)
        found = torch.frombuffer(memory, dtype=torch.uint8)
        self.in_use += size
        weakref.finalize(found.untyped_storage(), self._returned, memory)
        return found

    def _returned(self, memory: Any) -> None:
        self.in_use -= memory.nbytes
        self._free[memory.nbytes].append(memory)

    def device_memory(self, size: int) -> torch.Tensor:
        return torch.full((size,), NAN, dtype=torch.uint8)

    def copy(self, pairs: Pairs, to_host: bool, after: Iterable[Any]) -> Copy:
        with torch_private.without_modes():
            held = [(Bytes(device), Bytes(host)) for device, host in pairs]
        begun = Copy(held, to_host, list(after), self.clock())
        with self._one_at_a_time:
            self._streams[to_host].append(begun)
            if not self.late:
                self._do(begun)
        return begun

    def _do(self, copy: Copy) -> None:
        """Do a copy, and what comes before it in its stream."""
        stream = self._streams[copy.to_host]
        while not copy.is_done:
            earliest = stream.pop(0)
            for other in earliest.after:
                self._do(other)
            with torch_private.without_modes():
                for pair in earliest.pairs:
                    self._move(*(pair if copy.to_host else pair[::-1]), copy.to_host)
            earliest.is_done, earliest.pairs = True, []
            self.lasted.append(self.clock() - earliest.began)

    def _move(self, source: Bytes, target: Bytes, to_host: bool) -> None:
        found, written = source.now(), target.now()
        if written is None:
            self.faults.append("wrote memory that was freed")
        elif found is None or (to_host and not torch.equal(found, source.then)):
            self.faults.append("read memory that was freed" if found is None else "read memory that was written since")
            written.fill_(NAN)
        else:
            written.copy_(found)

    def wait(self, event: Any) -> Any:
        with self._one_at_a_time:
            had_to_wait = not event.is_done
            self._do(event)
        return had_to_wait

    def had_to_wait(self, waiting: Any) -> bool:
        return bool(waiting)

    def is_done(self, event: Any) -> bool:
        return bool(event.is_done)


@contextlib.contextmanager
def simulated(late: bool = True, smallest: int = 0) -> Iterator[Simulated]:
    """In which tensors on the CPU are those of a simulated device."""
    device = Simulated(late=late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "transport_of", lambda _: device)
        patch.setattr(offload, "SMALLEST", smallest)
        yield device
    gc.collect()
