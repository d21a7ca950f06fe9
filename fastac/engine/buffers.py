"""Buffers that a block writes: counters, running statistics, codebooks. Without checkpointing they are written once.

So does a region. Its recompute runs on copies of what the forward began with, and the buffers stay as the forward left
them. Which ones a block writes is seen by comparing all values, in the steps whose values are compared. In other steps
these are copied, and of the rest versions are compared, as a block may begin to write later. Where a block has few
buffers, small ones are always copied for that case.
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
"""Bytes of a small buffer; number of buffers of a block up to which small ones are always copied."""

LARGE = 64 * 2**20
"""Bytes that are kept for one region from which on the log says so."""

_ABSENT = object()
"""Stands for a buffer that was not registered."""


@dataclasses.dataclass(eq=False)
class _Buffer:
    """A buffer as it stood."""

    known: KnownBuffer
    tensor: Any  # None, or _ABSENT, where there was none
    version: int | None  # None where it has none
    value: torch.Tensor | None  # a copy, where one was made

    @property
    def now(self) -> Any:
        """What stands in its place."""
        return self.known.buffers.get(self.known.name, _ABSENT)

    def was_written(self, looks: bool) -> bool:
        """Whether it was written since, or another was put in its place. looks: compare its value."""
        if self.now is not self.tensor or self.is_newer:
            return True
        if not looks or self.value is None or is_equal(self.tensor, self.value):
            return False
        self.known.has_versions = False  # it is written through `data`
        return True

    @property
    def is_newer(self) -> bool:
        """Whether the tensor that stood there has another version."""
        return self.version is not None and self.tensor._version != self.version

    def copy(self) -> Any:
        """What a recompute gets in its place."""
        if self.version is None:
            return self.tensor
        source = self.tensor if self.value is None else self.value
        copy = source.detach().clone().requires_grad_(self.tensor.requires_grad)
        torch_private.set_version(copy, self.version)
        return copy


class Buffers:
    """The buffers of some modules as a forward began; once it has ended, those that the modules write.

    looks: compare the values of all of them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], looks: bool) -> None:
        self.looks, self.modules = looks, modules if looks else ()
        self.lock = state_of(modules[0]).lock
        known = [one for module in modules for one in state_of(module).buffers or ()]
        small = SMALL if len(known) <= FEW else -1
        self.buffers = [_begin(one, sys.maxsize if looks or one.is_written else small) for one in known]

    def keep_written(self, where: str) -> Buffers | None:
        """The forward has ended: keep what the modules write, if anything. where: the block, in words.

        Raises FastacError for a large buffer that they begin to write in a later step.
        """
        for module in self.modules:  # what was registered since
            self.buffers += [_Buffer(known, _ABSENT, None, None) for known in _find(module, state_of(module))]
        self.modules = ()
        found = [one for one in self.buffers if not one.known.is_written and one.was_written(self.looks)]
        for one in found:
            one.known.is_written = True
        self.buffers = [one for one in self.buffers if one.known.is_written]
        if lost := ", ".join(one.known.name for one in found if one.is_newer and one.value is None):
            raise FastacError(
                f"{where}: it began to write a buffer ({lost}) in a step in which fastac had no copy of it: recompute "
                f" would begin with what the forward left, and gradients would be wrong.\nFrom now on it is "
                f"copied: run the step again, or resume from a checkpoint."
            )
        size = sum(_size(one.value) for one in self.buffers if one.value is not None)
        if found and size >= LARGE:
            logger.warning("%s: copies %s of buffers that it writes, for each region", where, readable_bytes(size))
        return self if self.buffers else None

    @contextlib.contextmanager
    def as_the_forward_began(self) -> Iterator[None]:
        """A context in which the modules have copies of these buffers, which a recompute may write."""
        with self.lock:  # of two threads that recompute one block, each must put back what was there before both
            before = [(one.known, one.now) for one in self.buffers]
            copies: dict[int, Any] = {}  # a tensor may be a buffer of two modules
            for one in self.buffers:
                if id(one.tensor) not in copies:
                    copies[id(one.tensor)] = one.copy()
                _put(one.known, copies[id(one.tensor)])
            try:
                yield
            finally:
                for known, tensor in before:
                    _put(known, tensor)


def begin(modules: Sequence[torch.nn.Module], looks: bool) -> Buffers | None:
    """The buffers of some modules, as a forward begins; None where the modules have none.

    looks: compare the values of all of them. A module that was never looked at is looked at.
    """
    states = [state_of(module) for module in modules]
    looks = looks or any(state.buffers is None for state in states)
    for module, state in zip(modules, states, strict=True):
        if looks or any(one.is_written for one in state.buffers or ()):  # another module may stand in its place
            _find(module, state)
    if not (modules and (looks or any(state.buffers for state in states))):
        return None
    return Buffers(modules, looks)


def _find(module: torch.nn.Module, state: BlockState) -> list[KnownBuffer]:
    """Bring the state of a module up to date. Returns the buffers that it did not name."""
    before = {(id(one.buffers), one.name): one for one in state.buffers or ()}
    state.buffers, new = [], []
    owners, state.buffer_dicts = state.buffer_dicts, set()
    for owner in module.modules():
        buffers = _dict_of(owner)
        state.buffer_dicts.add(id(buffers))
        for name in buffers:
            known = before.get((id(buffers), name))
            if known is None:
                known = KnownBuffer(buffers, name)
                new += [known] if id(buffers) in owners else []  # a module that was made since stays as it is
            state.buffers.append(known)
    return new


def _dict_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's buffers; none of one of TorchScript."""
    return module._buffers if isinstance(module._buffers, dict) else {}


def _begin(known: KnownBuffer, copied: int = sys.maxsize) -> _Buffer:
    """A buffer as it stands. copied: bytes up to which it is copied."""
    tensor: Any = known.buffers.get(known.name, _ABSENT)
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return _Buffer(known, tensor, None, None)
    value = _copy_of(known, tensor) if copied == sys.maxsize or _size(tensor) <= copied else None
    return _Buffer(known, tensor, tensor._version, value)


def _copy_of(known: KnownBuffer, tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that nobody writes: the latest one, if another region keeps it and the buffer is as it was."""
    copy = known.copy() if known.has_versions else None
    if copy is None or known.copied != (id(tensor), tensor._version):
        # Of a tensor subclass, or quantized in an unusual way, which somebody may just keep there.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            copy = tensor.detach().clone()
            known.copy, known.copied = weakref.ref(copy), (id(tensor), tensor._version)
    return copy


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a plain tensor; of any other, so many that it counts as large."""
    return tensor.nbytes if torch_private.is_plain(tensor) else SMALL + 1


def _put(known: KnownBuffer, tensor: Any) -> None:
    if tensor is _ABSENT:
        known.buffers.pop(known.name, None)
    else:
        known.buffers[known.name] = tensor


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor and a copy of it have the same bits, of any dtype. True if they are not plain."""
    if not torch_private.is_plain(one):
        return True
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


@contextlib.contextmanager
def buffers_preserved(modules: Iterable[torch.nn.Module]) -> Iterator[Preserved]:
    """Restore the buffers of some modules at the end: the tensors themselves, and their values."""
    preserved = Preserved(modules)
    try:
        yield preserved
    finally:
        preserved.restore()


class Preserved:
    """The buffers of some modules as they stood."""

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
        """Those that were written since, by name, as they are now."""
        found = {name: one.now for name, one in self.buffers.items() if one.was_written(looks=True)}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def restore(self) -> None:
        """Put all of them back, and remove what was registered since."""
        known = {(id(one.known.buffers), one.known.name) for one in self.buffers.values()}
        for _, owner in self._owners():
            for name in list(_dict_of(owner)):
                if (id(owner._buffers), name) not in known:
                    del owner._buffers[name]
        for one in self.buffers.values():
            _put(one.known, one.tensor)
            # Writing would count as an in-place change.
            if one.value is not None and (one.is_newer or not is_equal(one.tensor, one.value)):
                one.tensor.detach().copy_(one.value)
