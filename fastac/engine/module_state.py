"""What a block may change in its modules: their buffers, and whether they are in training mode.

A forward begins with a `Snapshot` of both, and each recompute runs on it: in the mode of the forward, on copies of its
buffers. Afterwards the modules are as the forward left them, so counters, running statistics and codebooks are written
once. In the steps whose values are compared all buffers are copied, which shows the ones that the block writes. From
then on these are copied in every step, and small ones always.

A call may read a large buffer before another call of the step is the first to write it. Then the writer has a copy of
what both began with, and hands it to the calls that are still to be recomputed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import MANY, describe, state_of
from fastac.engine.process import process
from fastac.errors import FastacError

SMALL, FEW = 2**16, 8
"""If a block has at most FEW buffers, those of at most SMALL bytes are copied in every step, whoever writes them."""

_numbers = itertools.count()
_NOTHING = contextlib.nullcontext()
_Dict = dict[str, Any]


class Snapshot:
    """Modes and buffers of some modules at one moment.

    Args:
        owners: the attributes (`vars`) of the modules whose modes are kept.
        modes: whether these are in training mode.
        dicts: the dicts of the buffers of all of the modules.
        looks: copy all buffers. Then writes are seen that no version shows.
        lock: held while the modules are as they were.
    """

    def __init__(
        self, owners: Sequence[_Dict], modes: Sequence[bool], dicts: Sequence[_Dict], looks: bool, lock: Any = _NOTHING
    ) -> None:
        self.owners, self.modes, self.dicts, self.looks, self.lock = owners, modes, dicts, looks, lock
        self.number = next(_numbers)
        # Each dict of buffers that was not empty, and what was in it.
        self.before = [(d, dict(d)) for d in self.dicts if d] if any(self.dicts) else []
        # By tensor, which several modules may hold.
        self.versions: dict[torch.Tensor, int] = {}
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.small = SMALL if sum([len(tensors) for _, tensors in self.before]) <= FEW else -1
        for key, tensor in self._tensors() if self.before else ():
            if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
                continue
            self.versions[tensor] = tensor._version
            if looks or key in process.written_buffers or (self.small >= 0 and _size(tensor) <= self.small):
                # Quantized tensors and some subclasses cannot be copied.
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    self.copies[tensor] = torch_private.clone(tensor.detach(), tensor.stride())

    def _tensors(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """Key and value of each buffer."""
        return (((id(d), name), tensor) for d, tensors in self.before for name, tensor in tensors.items())

    def changed(self) -> set[torch.Tensor]:
        """The buffers that were written since. One that was replaced is not written by that."""
        return {
            tensor
            for tensor, version in self.versions.items()
            if tensor._version != version
            or (self.looks and tensor in self.copies and not _is_equal(tensor, self.copies[tensor]))
        }

    def end_forward(self, function: Any, modules: Iterable[torch.nn.Module]) -> None:
        """The forward of a function has ended: keep no copies of large buffers that its modules do not write.

        Raises FastacError for a large buffer that they begin to write in a step without copies.
        """
        if not self._find_buffers():
            return
        changed = self.changed()
        known = process.written_buffers
        written = {key: tensor for key, tensor in self._tensors() if tensor in changed or key in known}
        if not written.keys() <= known:
            known.update(written)
            for module in modules:  # they may write others past their versions: the next region looks at all
                state_of(module).submodules = None
        if lost := [name for (_, name), tensor in written.items() if tensor in changed - self.copies.keys()]:
            raise FastacError(
                f"{describe(function)}: it began to write a buffer ({', '.join(lost)}) in a step in which fastac had "
                f"no copy of it: recompute would begin with what the forward left, and gradients would be wrong.\n"
                f"From now on it is copied: run the step again, or resume from a checkpoint."
            )
        kept = {tensor: self.copies[tensor] for tensor in written.values() if tensor in self.copies}
        self.copies = kept | {t: copy for t, copy in self.copies.items() if _size(t) <= self.small}
        if kept and process.snapshots:
            self._hand_over(kept)
        self.versions_without_copy = {t: version for t, version in self.versions.items() if t not in self.copies}
        if self.versions_without_copy:
            process.snapshots[self.number] = self

    def _hand_over(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give copies to regions that are alive, began with the same value, and have no copy of it."""
        readers: list[Snapshot] = [*process.snapshots.copy().values()]
        for reader, (tensor, copy) in itertools.product(readers, copies.items()):
            # A region inside this one may have begun after a write that no version shows.
            began_before = reader.number < self.number or tensor._version != self.versions[tensor]
            if began_before and reader.versions_without_copy.get(tensor) == self.versions[tensor]:
                reader.copies[tensor] = copy
                del reader.versions_without_copy[tensor]

    def _find_buffers(self) -> bool:
        """Whether the modules have buffers, or had some. Notes that dicts which are no longer empty were empty."""
        if any(self.dicts):
            known = {id(d) for d, _ in self.before}
            self.before += [(d, {}) for d in self.dicts if d and id(d) not in known]
        return bool(self.before)

    @contextlib.contextmanager
    def restored(self) -> Iterator[dict[int, torch.Tensor]]:
        """A context in which the modules are as they were. They may write into their buffers, which are copies.

        Its value: `id` of the copy -> buffer.
        """
        # If two threads recompute one block at the same time, one of them would put back the copies of the other.
        with self.lock if self._find_buffers() else _NOTHING:
            copies = {tensor: self._copy(tensor) for tensor in self.copies}
            modes, before = [own["training"] for own in self.owners], [(d, dict(d)) for d, _ in self.before]
            _put(self.owners, self.modes, self.before, copies)
            try:
                yield {id(copy): tensor for tensor, copy in copies.items()}
            finally:
                _put(self.owners, modes, before, {})

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        source = self.copies[tensor]  # the buffer may have another shape now
        copy = torch_private.clone(source, source.stride()).requires_grad_(tensor.requires_grad)
        if tensor.grad_fn is not None:
            with torch.enable_grad():
                copy = copy.clone()  # a leaf that requires grad could not be written
        vars(copy).update(vars(tensor))
        # Versions are compared with those of the forward, for every tensor that recompute saves.
        torch_private.set_version(copy, self.versions[tensor])
        return copy


def _put(
    owners: Iterable[_Dict],
    modes: Iterable[bool],
    before: Iterable[tuple[_Dict, _Dict]],
    copies: Mapping[torch.Tensor, torch.Tensor],
) -> None:
    """Give modules the modes and buffers that they had, with copies in the place of some buffers."""
    for own, mode in zip(owners, modes, strict=True):
        own["training"] = mode
    for buffers, tensors in before:
        buffers.clear()
        buffers.update({name: copies.get(tensor, tensor) for name, tensor in tensors.items()})


def in_place_of(saved: torch.Tensor, buffers: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The buffer, or the view of it, that autograd saves without checkpointing where a recompute saves a copy.

    Backward reads what it holds at that time, as after a write that no version shows (`data`, batch norm), and raises
    after any other write.
    """
    copy = saved if saved._base is None else saved._base
    buffer = buffers.get(id(copy))
    if buffer is None or buffer.dtype != saved.dtype:
        return saved
    if copy is saved:
        return buffer
    offset = buffer.storage_offset() + saved.storage_offset() - copy.storage_offset()
    return buffer.detach().as_strided(saved.shape, saved.stride(), offset)


def begin(modules: Sequence[torch.nn.Module], looks: bool) -> Snapshot | None:
    """The state of some modules, as a forward begins; None without modules.

    looks: copy all buffers, and search the modules for submodules that are new. Both are done if a module is new.
    """
    owners: list[_Dict] = []
    dicts: list[_Dict] = []
    for module in modules:
        state = state_of(module)
        if looks or state.submodules is None:
            looks = True
            # Without the block's own attributes: they would refer to themselves, and outlive the block.
            state.submodules = _owners(inner for inner in module.modules() if inner is not module)
            state.buffers = [own["_buffers"] for own in _owners(module.modules())]
        dicts += state.buffers
        # A function may refer to a whole model. To read the modes of so many modules in each region takes time.
        owners += (*_owners((module,)), *state.submodules) if len(state.submodules) < MANY else ()
    if not modules:
        return None
    modes, state = tuple([own["training"] for own in owners]), state_of(modules[0])
    # In another mode a block may write other buffers, as batch norm does.
    looks = looks or modes not in state.modes
    state.modes.add(modes)
    return Snapshot(owners, modes, dicts, looks, state.lock)


def _owners(modules: Iterable[torch.nn.Module]) -> list[_Dict]:
    """The attributes of some modules. In TorchScript, modes and buffers are not among them."""
    return [own for own in map(vars, modules) if "training" in own and isinstance(own.get("_buffers"), dict)]


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a plain tensor; for any other tensor a number that counts as large."""
    return tensor.nbytes if torch_private.is_plain(tensor) else SMALL + 1


def _is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor and a copy of it have the same bits, in any dtype. True if they are not plain."""
    if not torch_private.is_plain(tensor):
        return True
    # As bytes: a NaN then equals itself, in every dtype.
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, copy)))


@contextlib.contextmanager
def modules_preserved(modules: Iterable[torch.nn.Module]) -> Iterator[Snapshot]:
    """Restore modes and buffers of some modules at the end: the tensors themselves, and their values."""
    owners = _owners(inner for module in modules for inner in module.modules())
    snapshot = Snapshot(owners, [own["training"] for own in owners], [own["_buffers"] for own in owners], looks=True)
    try:
        yield snapshot
    finally:
        _put(snapshot.owners, snapshot.modes, snapshot.before, {})
        # Only these: a write counts as an in-place change, and a graph of the user may have saved the buffer.
        for tensor in snapshot.changed() & snapshot.copies.keys():
            tensor.detach().copy_(snapshot.copies[tensor])
