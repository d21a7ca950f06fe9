"""Bytes that are alive while a step runs, by weak references to storages that ops return.

What kernels and compiled code allocate by themselves, `allocated_bytes` sees, by the allocator's events.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastac.verification.measuring import allocated_bytes


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


def peak_of(run: Callable[[], Any], outside: Iterable[Any] = ()) -> int:
    """The most bytes alive at one time while `run` runs, its result among them."""
    gc.collect()
    with LiveBytes(outside) as meter:
        run()
    return meter.peak


def allocated(run: Callable[[], Any]) -> int:
    """Bytes that `run` allocates and that live on after it, its result among them, from the allocator's events.

    Without the garbage collector, which in training comes when it likes.
    """
    gc.disable()
    try:
        return allocated_bytes(run).held
    finally:
        gc.enable()


def allocated_at_most(run: Callable[[], Any]) -> int:
    """The most bytes that `run` allocates at one time, from the allocator's events."""
    return allocated_bytes(run).peak
