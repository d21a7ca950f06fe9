"""Buffers that a block writes: counters, running statistics, codebooks. Without checkpointing they are written once.

So does a region. Its recompute runs on copies of what the forward began with, and the buffers stay as the forward left
them. Which ones a block writes is seen by comparing their values, in the steps whose values are compared; in other
steps these are copied, and small ones, as a block may begin to write later. Copies of what was not written are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import known_record, record_of
from fastac.errors import readable_bytes

logger = logging.getLogger("fastac")

SMALL = 2**16
"""Bytes of a buffer up to which it is copied whether the block was seen to write it or not."""

LARGE = 64 * 2**20
"""Bytes that are kept for one region from which on the log says so."""

_lock = threading.RLock()
"""Held while a recompute runs on copies: of two threads, each must put back what was there before both."""


class _Buffer:
    """A buffer as a forward began.

    known: of the block, its buffers and whether it writes them. looks: compare its value.
    """

    def __init__(self, owner: torch.nn.Module, name: str, known: dict[Any, bool], looks: bool) -> None:
        self.owner, self.name, self.known, self.looks = owner, name, known, looks
        self.tensor: torch.Tensor = owner._buffers[name]  # type: ignore[assignment]
        self.version = self.tensor._version
        is_copied = looks or self.is_written or self.tensor.nbytes <= SMALL
        self.value = self.tensor.detach().clone() if is_copied else None

    @property
    def is_written(self) -> bool:
        """Whether the block was seen to write it."""
        return self.known[self.owner, self.name]

    def see_written(self) -> bool:
        """The forward has ended: note whether it wrote the buffer, or put another in its place. Returns that."""
        now = self.owner._buffers.get(self.name)
        written = now is not self.tensor or now._version != self.version
        if not written and self.looks and self.value is not None and torch_private.is_plain(self.tensor):
            written = not torch.equal(self.tensor, self.value)  # through `data`, which has no version
        self.known[self.owner, self.name] = written
        return written


class Buffers:
    """The buffers of some modules as a forward began; once it has ended, those that the modules write."""

    def __init__(self, modules: Iterable[torch.nn.Module], looks: bool) -> None:
        self.buffers: list[_Buffer] = []
        for module in modules:
            record = record_of(module)
            known, is_new = record.buffers, looks or record.buffers is None
            if known is None or looks:
                known = {one: bool(known and known.get(one)) for one in _buffers_of(module)}
                record.buffers = known
            self.buffers += [
                _Buffer(owner, name, known, is_new) for owner, name in known if _is_kept(owner._buffers.get(name))
            ]

    def keep_written(self, where: str) -> Buffers | None:
        """The forward has ended: keep what the modules write, if anything. where: the block, in words."""
        found = [one for one in self.buffers if not one.is_written and one.see_written()]
        self.buffers = [one for one in self.buffers if one.is_written]
        size = sum(one.tensor.nbytes for one in self.buffers)
        if found and size >= LARGE:
            logger.warning("%s: copies %s of buffers that it writes, for each region", where, readable_bytes(size))
        if late := ", ".join(one.name for one in found if one.value is None):
            logger.warning("%s: began to write %s: this one recompute begins with what it left", where, late)
        return self if self.buffers else None

    @contextlib.contextmanager
    def as_the_forward_began(self) -> Iterator[None]:
        """A context in which the modules have copies of these buffers, which a recompute may write."""
        with _lock:
            before = [(one.owner._buffers, one.name, one.owner._buffers.get(one.name)) for one in self.buffers]
            copies: dict[torch.Tensor, torch.Tensor] = {}
            for one in self.buffers:
                if one.tensor not in copies:  # a tensor may be a buffer of two modules
                    copies[one.tensor] = (one.tensor if one.value is None else one.value).detach().clone()
                    torch_private.set_version(copies[one.tensor], one.version)
                one.owner._buffers[one.name] = copies[one.tensor]
            try:
                yield
            finally:
                for buffers, name, tensor in before:
                    buffers[name] = tensor


@contextlib.contextmanager
def buffers_preserved(module: torch.nn.Module | None) -> Iterator[Mapping[str, torch.Tensor]]:
    """Restore a module's buffers at the end: the tensors themselves, and their values. Gives these by name."""
    named = [] if module is None else list(module.named_modules())
    before = [
        (f"{prefix}.{name}".lstrip("."), owner, name, buffer, buffer.detach().clone())
        for prefix, owner in named
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield {whole: value for whole, _, _, _, value in before}
    finally:
        for _, owner, name, buffer, value in before:
            if getattr(owner, name) is not buffer:
                setattr(owner, name, buffer)
            if not torch.equal(buffer, value):  # writing would count as an in-place change
                buffer.detach().copy_(value)


def begin(modules: Iterable[torch.nn.Module], looks: bool) -> Buffers | None:
    """The buffers of some modules, as a forward begins; None where the modules have none.

    looks: compare the values of all of them. A module that was never looked at is looked at.
    """
    if not looks and all((record := known_record(one)) is not None and record.buffers == {} for one in modules):
        return None
    found = Buffers(modules, looks)
    return found if found.buffers else None


def _buffers_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    for owner in module.modules():
        if isinstance(owner._buffers, dict):  # not those of TorchScript
            yield from ((owner, name) for name in owner._buffers)


def _is_kept(buffer: Any) -> bool:
    """Whether a buffer can be written in training, and copied."""
    return isinstance(buffer, torch.Tensor) and not (buffer.is_inference() or torch.nn.parameter.is_lazy(buffer))
