"""One training step, region by region: what it holds and how long it takes, noted while it runs for policy "auto".

While a `MeasuredStep` is open in a thread, regions store no outputs. Each notes what it could store, and what is
allocated when its forward and its recompute begin and end.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import device_memory, torch_private
from fastac.engine.torch_private import tree_leaves
from fastac.registry import BoundOp, flops

if TYPE_CHECKING:
    from fastac.engine.offload import Stash


@dataclasses.dataclass(eq=False)
class MeasuredCall:
    """One call whose outputs could be stored."""

    # Of the op: attention, linear or exchange.
    kind: str
    # Of the op, or of the Linear module in its block.
    name: str
    keys: int
    # It is the tape's so many-th call.
    number: int
    bytes: int
    flops: int
    # Moments before and after it, if kernels are timed.
    times: tuple[Any, Any] | None
    # Version counters of outputs that would be stored as they are, with their versions. They hold no other memory.
    counters: Sequence[tuple[torch.Tensor, int]]
    # If it is stored, recompute returns the stored outputs, not copies of them.
    is_shared: bool
    # An output was changed in place before the region ended.
    is_written: bool = False
    # The storages that recompute returned.
    again: Collection[StorageWeakRef] = ()
    # Bytes of these storages that backward still needs when the most is allocated.
    kept: int = 0

    @property
    def likeness(self) -> object:
        """Equal for calls that take equally long."""
        return self.kind, self.name, self.bytes, self.flops


class Reading(NamedTuple):
    """Bytes of the device at one moment."""

    # In tensors that are alive.
    allocated: int
    # The most that tensors had at one time, up to now.
    peak: int
    # Of regions, that are only on the host.
    away: int

    @property
    def level(self) -> int:
        """What would be allocated if nothing were on the host."""
        return self.allocated + self.away


NOTHING = Reading(0, 0, 0)


class MeasuredRegion:
    """One region of a step that is measured. inputs: bytes of inputs that no earlier region has."""

    def __init__(self, measurement: MeasuredStep, block: torch.nn.Module | None, inputs: int) -> None:
        self.measurement, self.block, self.inputs = measurement, block, inputs
        self.calls: list[MeasuredCall] = []
        # The number of calls of the tape that recompute comes to before it ends.
        self.reached = 0
        # Of a region that offloads, weakly: what it holds goes with the region's graph.
        self.stash: weakref.ref[Stash] | None = None
        # Bytes of each storage that offload moves to the host.
        self.leaving: list[int] = []
        self.began = measurement.read()
        self.began_at = self.ended_at = measurement.now()
        # Of the parameters that are trained, on this rank.
        trained = [p for p in (block.parameters() if block is not None else ()) if p.requires_grad]
        self.gradients = sum(device_memory.local(parameter).nbytes for parameter in trained)
        # What was allocated when its recompute began, and the most whenever backward asked for a tensor after that.
        self.recompute = NOTHING
        self.highest = -1
        # Bytes that recompute stores for backward, and those of the largest storage among them.
        self.packed = self.largest = 0

    def note(
        self,
        op: BoundOp,
        product: str,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        outputs: Any,
        *,
        number: int,
        guarded: bool = True,
        began: Any = None,
    ) -> None:
        """A call has run that could be stored.

        product: the Linear module whose output it is, or "". number: it is the tape's so many-th call. guarded: it
        would be stored without a copy. began: the moment before it, if kernels are timed.
        """
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        call = MeasuredCall(
            kind=op.kind,
            name=product or op.name,
            keys=int(op.keys(*arguments)) if op.is_attention else 0,
            number=number,
            bytes=sum(_storages(tensors).values()),
            flops=flops.counted(op.op, *arguments, outputs),
            times=(began, self.measurement.now()) if began is not None else None,
            counters=[(torch_private.version_counter(tensor), tensor._version) for tensor in tensors if guarded],
            is_shared=guarded,
        )
        self.calls.append(call)

    def end_forward(self, stash: Stash | None) -> None:
        """The forward has ended. stash: of a region that offloads."""
        self.ended_at, self.stash = self.measurement.now(), None if stash is None else stash.reference
        for call in self.calls:
            call.is_written = any(counter._version != version for counter, version in call.counters)
            call.counters = ()

    def begin_recompute(self) -> None:
        """A recompute begins: of several, the first counts."""
        if self not in self.measurement.recomputed:
            self.measurement.recomputed.append(self)
            self.recompute = self.measurement.read()

    def ran_again(self, number: int, outputs: Any) -> None:
        """Recompute has run a call. number: as in `note`."""
        self.reached = number
        for call in self.calls:
            if call.number == number:
                call.again = _storages(tree_leaves(outputs)).keys()

    def end_recompute(self, stored: Collection[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        """A recompute has ended. stored: tensors for backward."""
        outside = _storages(weights)
        sizes = {key: size for key, size in _storages(stored).items() if key not in outside}
        self.packed, self.largest = sum(sizes.values()), max(sizes.values(), default=0)
        self.sample(stored)

    def sample(self, stored: Iterable[torch.Tensor]) -> None:
        """Backward asks for a tensor of the region. stored: the tensors of recompute that backward still needs."""
        allocated = self.measurement.read().allocated
        if allocated > self.highest:
            self.highest, sizes = allocated, _storages(stored)
            for call in self.calls:
                call.kept = sum(sizes.get(key, 0) for key in call.again)


def _storages(tensors: Iterable[Any]) -> dict[StorageWeakRef, int]:
    """A weak reference to each storage -> its bytes. While it lives, no other storage gets the address."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor) and torch_private.has_storage(t)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


class MeasuredStep:
    """One forward of a model, and its backward.

    Args:
        device: the device that computes.
        need: bytes that backward allocates besides what blocks hold: gradients of parameters.
        limit: bytes that may be allocated.
        blocks: number of blocks that may run.
    """

    def __init__(self, device: torch.device, need: int, limit: int, blocks: int) -> None:
        self._device, self._need, self._limit, self._blocks = device, need, limit, blocks
        # Whether each kernel is timed by itself.
        self.times_kernels = device.type not in device_memory.UNCOUNTED
        self.regions: list[MeasuredRegion] = []
        # Regions in the order of their recomputes.
        self.recomputed: list[MeasuredRegion] = []
        # Storages that were inputs of regions, weakly.
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        # Whether blocks have to leave for the host; None until the second region begins.
        self._is_short: bool | None = None
        self.began, self.began_at = self.read(), self.now()
        # What was allocated when the forward had ended, and when backward had.
        self.ended = self.after = NOTHING
        self.has_ended = False
        self.ended_at: Any = None

    def now(self) -> Any:
        """This moment, on the device."""
        return device_memory.now(self._device)

    def read(self) -> Reading:
        """What is allocated now. Zeros if nobody counts it."""
        memory = device_memory.memory_of(self._device)
        self.is_counted = memory is not None
        if memory is None:
            return NOTHING
        stashes = (region.stash() for region in self.regions if region.stash is not None)
        stashed = (storage for stash in stashes if stash is not None for storage in stash.storages)
        away = sum(storage.size for storage in stashed if storage.device is None and not storage.reloads)
        return Reading(memory.allocated, memory.peak, away)

    def begin(self, block: torch.nn.Module | None, inputs: Iterable[Any]) -> MeasuredRegion:
        """A region begins."""
        new = {tensor.untyped_storage(): None for tensor in tree_leaves(inputs) if torch_private.is_plain(tensor)}
        size = sum(storage.nbytes() for storage in new if storage not in self._seen)
        self._seen.update(new)
        region = MeasuredRegion(self, block, size)
        self.regions.append(region)
        return region

    def end_forward(self) -> None:
        """The forward of the model has ended."""
        self.ended, self.ended_at = self.read(), self.now()
        for region in self.regions:
            if region.stash is not None and (stash := region.stash()) is not None:
                region.leaving = [s.size for s in stash.storages if s.device is None or s.frees_memory(stash)]

    def end_backward(self) -> None:
        """Its backward has ended."""
        self.has_ended, self.after = True, self.read()

    @property
    def needs_host(self) -> bool:
        """Whether the step would not fit if no block waited on the host, as its first region lets expect."""
        if self._is_short is None and len(self.regions) > 1:
            allocated = self.regions[1].began.allocated
            held = allocated - self.regions[0].began.allocated
            # Recompute and backward of a block hold about three times what its attention and Linear modules return.
            block = 3 * sum(call.bytes for call in self.regions[0].calls)
            self._is_short = allocated + held * (self._blocks - 1) + block + self._need > self._limit
        return bool(self._is_short)
