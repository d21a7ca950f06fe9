"""Bytes that are alive while a step runs, by weak references to storages: a mode sees each the moment an op returns it.

Neither RSS nor saved_tensors_hooks see what checkpointing keeps. A kernel's scratch memory, and what compiled code
allocates by itself, no mode sees; `allocated_peak` does, by the allocator's own events.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that ops return while it is on. outside: tensors that are there before and do not count."""

    def __init__(self, outside: Iterable[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._outside = {storage._cdata for storage in _storages(outside)}
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for storage in _storages(outputs):
            key = storage._cdata
            if key not in self._alive and key not in self._outside:
                self._alive.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return outputs

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _tensors_of_python() -> list[torch.Tensor]:
    """Those with memory of their own: what vmap of another test left behind has none."""
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return [tensor for tensor in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]


class NewStorages(TorchDispatchMode):
    """Weak references to the storages that were not there when this was made."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata: tensor for tensor in _tensors_of_python()}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)):
            self.add(tensor)
        return outputs

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.before:
            self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def sizes(self) -> list[int]:
        """Of the new storages that live. Python's tensors count: a copy made below the mode was not seen by it."""
        for tensor in _tensors_of_python():
            self.add(tensor)
        return [nbytes for reference, nbytes in self.seen.values() if not reference.expired()]


def peak_of(run: Callable[[], Any], outside: Iterable[Any] = ()) -> int:
    """The most bytes alive at one time while `run` runs, its result among them."""
    gc.collect()
    with LiveBytes(outside) as meter:
        run()
    return meter.peak


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most bytes allocated at one time while `run` runs, from the allocator's events."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
