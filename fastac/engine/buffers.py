"""Buffers that a block writes: counters, running statistics, codebooks. Without checkpointing they are written once.

A region writes them once as well. Its recompute runs on copies of what the forward began with, and the buffers stay as
the forward left them. In the steps whose values are compared, the values of all buffers are compared too: that shows
which buffers a block writes. In other steps only these are copied. The versions of the rest are compared, because a
block may begin to write later. If a block has few buffers, small ones are always copied for that case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import BlockState, KnownBuffer, state_of
from fastac.errors import FastacError, readable_bytes

logger = logging.getLogger("fastac")

SMALL, FEW = 2**16, 8
"""Bytes of a small buffer. The most buffers that a block may have if its small ones are always copied."""

LARGE = 64 * 2**20
"""Bytes of copies for one region above which the log says so."""

_ABSENT = object()
"""Stands for a buffer that was not registered."""


@dataclasses.dataclass(eq=False)
class _Buffer:
    """A buffer, as it was at one moment."""

    known: KnownBuffer
    # The tensor; None if the buffer was None, _ABSENT if the module had none of that name.
    tensor: Any
    # None if the tensor does not count its changes, or is not a tensor.
    version: int | None
    # A copy of the tensor, if one was made.
    value: torch.Tensor | None

    @property
    def current(self) -> Any:
        """What the module has in its place now."""
        return self.known.buffers.get(self.known.name, _ABSENT)

    def was_written(self, looks: bool) -> bool:
        """Whether it was written since, or another tensor was put in its place. looks: compare its value."""
        if self.current is not self.tensor or self.is_newer:
            return True
        if not looks or self.value is None or is_equal(self.tensor, self.value):
            return False
        # The value changed and the version did not: it is written through `data`. A copy of an earlier region with the
        # same version may then be out of date, so `_copy_of` must not share it.
        self.known.has_versions = False
        return True

    @property
    def is_newer(self) -> bool:
        """Whether the tensor has another version than at that moment."""
        return self.version is not None and self.tensor._version != self.version

    def copy(self) -> Any:
        """The tensor that a recompute gets in its place."""
        if self.version is None:
            return self.tensor
        source = self.tensor if self.value is None else self.value
        copy = source.detach().clone().requires_grad_(self.tensor.requires_grad)
        # Versions are compared with those of the forward, for every tensor that recompute saves.
        torch_private.set_version(copy, self.version)
        return copy


class Buffers:
    """The buffers of some modules as a forward began; once it has ended, only the buffers that the modules write.

    looks: compare the values of all of them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], looks: bool) -> None:
        self.looks, self.modules = looks, modules if looks else ()
        self.lock = state_of(modules[0]).lock
        all_known = [known for module in modules for known in state_of(module).buffers or ()]
        small = SMALL if len(all_known) <= FEW else -1
        self.buffers = [_begin(known, sys.maxsize if looks or known.is_written else small) for known in all_known]

    def keep_written(self, where: str) -> Buffers | None:
        """The forward has ended: keep only the buffers that the modules write; None if there are none.

        where: the block, in words. Raises FastacError for a large buffer that the modules begin to write in a later
        step.
        """
        # Buffers that the forward registered did not exist for the recompute, which is to register them again.
        for module in self.modules:
            self.buffers += [_Buffer(known, _ABSENT, None, None) for known in _find(module, state_of(module))]
        self.modules = ()
        newly_written = [buffer for buffer in self.buffers if not buffer.known.is_written]
        newly_written = [buffer for buffer in newly_written if buffer.was_written(self.looks)]
        for buffer in newly_written:
            buffer.known.is_written = True
        self.buffers = [buffer for buffer in self.buffers if buffer.known.is_written]
        # A large buffer is copied only if the block is known to write it. The forward has overwritten this one.
        if lost := ", ".join(buffer.known.name for buffer in newly_written if buffer.is_newer and buffer.value is None):
            raise FastacError(
                f"{where}: it began to write a buffer ({lost}) in a step in which fastac had no copy of it: recompute "
                f"would begin with what the forward left, and gradients would be wrong.\nFrom now on it is "
                f"copied: run the step again, or resume from a checkpoint."
            )
        size = sum(_size(buffer.value) for buffer in self.buffers if buffer.value is not None)
        if newly_written and size >= LARGE:
            logger.warning("%s: copies %s of buffers that it writes, for each region", where, readable_bytes(size))
        return self if self.buffers else None

    @contextlib.contextmanager
    def as_the_forward_began(self) -> Iterator[None]:
        """A context in which the modules have copies of these buffers, which a recompute may write."""
        # If two threads recompute one block at the same time, one of them would put back the copies of the other.
        with self.lock:
            tensors = [(buffer.known, buffer.current) for buffer in self.buffers]
            copies: dict[int, Any] = {}  # by tensor, which may be a buffer of two modules
            for buffer in self.buffers:
                if id(buffer.tensor) not in copies:
                    copies[id(buffer.tensor)] = buffer.copy()
                _put(buffer.known, copies[id(buffer.tensor)])
            try:
                yield
            finally:
                for known, tensor in tensors:
                    _put(known, tensor)


def begin(modules: Sequence[torch.nn.Module], looks: bool) -> Buffers | None:
    """The buffers of some modules, as a forward begins; None if the modules have none.

    looks: compare the values of all of them. They are compared in any case if a module is new.
    """
    states = [state_of(module) for module in modules]
    looks = looks or any(state.buffers is None for state in states)
    for module, state in zip(modules, states, strict=True):
        # A submodule may have been replaced since the last region, and its buffers with it.
        if looks or any(known.is_written for known in state.buffers or ()):
            _find(module, state)
    if not (modules and (looks or any(state.buffers for state in states))):
        return None
    return Buffers(modules, looks)


def _find(module: torch.nn.Module, state: BlockState) -> list[KnownBuffer]:
    """Bring the list of buffers in the state of a module up to date. Returns the buffers that were not in it."""
    earlier = {(id(known.buffers), known.name): known for known in state.buffers or ()}
    state.buffers, new = [], []
    owners, state.buffer_dicts = state.buffer_dicts, set()
    for owner in module.modules():
        buffers = _dict_of(owner)
        state.buffer_dicts.add(id(buffers))
        for name in buffers:
            known = earlier.get((id(buffers), name))
            if known is None:
                known = KnownBuffer(buffers, name)
                # A submodule that the forward made stays: recompute finds it there, with its buffers.
                new += [known] if id(buffers) in owners else []
            state.buffers.append(known)
    return new


def _dict_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's buffers; empty for a module of TorchScript, whose buffers are not in a dict."""
    return module._buffers if isinstance(module._buffers, dict) else {}


def _begin(known: KnownBuffer, copied: int = sys.maxsize) -> _Buffer:
    """A buffer as it is now. copied: bytes up to which it is copied."""
    tensor: Any = known.buffers.get(known.name, _ABSENT)
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return _Buffer(known, tensor, None, None)
    value = _copy_of(known, tensor) if copied == sys.maxsize or _size(tensor) <= copied else None
    return _Buffer(known, tensor, tensor._version, value)


def _copy_of(known: KnownBuffer, tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that nobody writes: the latest one, if another region holds it and the buffer did not change since."""
    copy = known.copy() if known.has_versions else None
    if copy is None or known.copied != (id(tensor), tensor._version):
        # Some subclasses and quantized tensors cannot be cloned. Somebody may only keep them in the module.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            copy = tensor.detach().clone()
            known.copy, known.copied = weakref.ref(copy), (id(tensor), tensor._version)
    return copy


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a plain tensor; for any other tensor a number that counts as large."""
    return tensor.nbytes if torch_private.is_plain(tensor) else SMALL + 1


def _put(known: KnownBuffer, tensor: Any) -> None:
    if tensor is _ABSENT:
        known.buffers.pop(known.name, None)
    else:
        known.buffers[known.name] = tensor


def is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor and a copy of it have the same bits, in any dtype. True if they are not plain."""
    if not torch_private.is_plain(tensor):
        return True
    # As bytes: a NaN then equals itself, in every dtype.
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, copy)))


@contextlib.contextmanager
def buffers_preserved(modules: Iterable[torch.nn.Module]) -> Iterator[Preserved]:
    """Restore the buffers of some modules at the end: the tensors themselves, and their values."""
    preserved = Preserved(modules)
    try:
        yield preserved
    finally:
        preserved.restore()


class Preserved:
    """The buffers of some modules, as they were when this was made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = list(modules)
        self.buffers = {
            f"{prefix}.{name}".lstrip("."): _begin(KnownBuffer(_dict_of(owner), name))
            for prefix, owner in self._owners()
            for name in _dict_of(owner)
        }

    def _owners(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for number, module in enumerate(self.modules):
            yield from module.named_modules(prefix=str(number) if number else "")

    def written(self) -> Mapping[str, torch.Tensor]:
        """The buffers that were written since, by name, as they are now."""
        written = {name: buffer.current for name, buffer in self.buffers.items() if buffer.was_written(looks=True)}
        return {name: tensor for name, tensor in written.items() if isinstance(tensor, torch.Tensor)}

    def restore(self) -> None:
        """Put all of them back, and remove the buffers that were registered since."""
        names = {(id(buffer.known.buffers), buffer.known.name) for buffer in self.buffers.values()}
        for _, owner in self._owners():
            for name in list(_dict_of(owner)):
                if (id(owner._buffers), name) not in names:
                    del owner._buffers[name]
        for buffer in self.buffers.values():
            _put(buffer.known, buffer.tensor)
            # Only if needed: a write counts as an in-place change, and a graph of the user may have saved the buffer.
            if buffer.value is not None and (buffer.is_newer or not is_equal(buffer.tensor, buffer.value)):
                buffer.tensor.detach().copy_(buffer.value)
