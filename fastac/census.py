"""Which attention calls a region has, and whether every one that the policy saves was saved.

The first call of a block class with given input shapes is watched (`Observer`); later calls only compare the ops they
recorded with what was found then. What is known about a block is kept here, weakly, never on the block itself.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fastac import opaque
from fastac.checkpoint_wrappers import inside
from fastac.collectives import Communication
from fastac.registry import ResolvedOp
from fastac.tape import Record

logger = logging.getLogger("fastac")

MANY = 256
"""Input signatures of a block, or of a class, that are remembered; with more than that, all are learned anew."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call of a region. saved_bytes: memory its kept outputs hold, 0 when it is recomputed.

    extra_bytes: how many of these hold what only an opaque kernel's backward needs.
    """

    op: str
    keys: int
    saved: bool
    saved_bytes: int
    extra_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Product:
    """The output of one Linear module of a region that is saved. saved_bytes: memory that it holds."""

    name: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class Census:
    """The attention calls of one region, in order. ops: what a later region of this kind must record.

    selection_bytes: memory held by the choices of sparse attention (top-k and sort outputs). compiled: it runs
    code that torch.compile made. writing: collectives that write a buffer of their caller's, as far as it was watched;
    they are never saved. FSDP's own are not among them. communicates: it issues collectives of any kind, FSDP's too.
    """

    ops: list[ResolvedOp]
    calls: tuple[Call, ...]
    selection_bytes: int = 0
    compiled: bool = False
    writing: tuple[str, ...] = ()
    communicates: bool = False
    products: tuple[Product, ...] = ()
    others: list[list[ResolvedOp]] = dataclasses.field(default_factory=list)
    """What a function that is no block was found to record as well: one function may run several unlike layers."""

    @functools.cached_property
    def keys(self) -> list[int]:
        """Over how many keys each call attends, which may depend on the values of a mask."""
        return [call.keys for call in self.calls]

    @functools.cached_property
    def linear(self) -> list[str]:
        """The Linear modules whose outputs are saved, in the order of their calls."""
        return [product.name for product in self.products]

    @classmethod
    def of_tape(cls, record: Record) -> Census:
        """From a region that has just been recorded on a tape."""
        calls, products = [], []
        for entry in filter(None, record.tape):
            if entry.linear:
                products.append(Product(entry.linear, entry.saved_bytes))
            if not entry.resolved.is_attention:
                continue
            extra = opaque.extra_bytes(entry.resolved, entry.kept or ())
            calls.append(Call(entry.resolved.name, int(entry.keys), entry.kept is not None, entry.saved_bytes, extra))
        return cls(list(record.calls), tuple(calls), record.tape.choices.held_bytes, products=tuple(products))


@dataclasses.dataclass
class BlockRecord:
    """What is known about one block. censuses: of its regions, by policy and input signature; latest: the last one.

    communication: of its latest region, None where that had no functional collective.
    looked: when the autograd graph of a region was last looked through for compiled code, as `compiled_graphs` counts.
    """

    block: weakref.ref[torch.nn.Module]
    name: str = ""
    latest: Census | None = None
    latest_key: object = None
    communication: Communication | None = None
    looked: int = -1
    censuses: dict[Any, Census] = dataclasses.field(default_factory=dict)

    def begin(self, name: str) -> None:
        """Its model was enabled: what another policy did is no longer so, nor what the block was made of."""
        self.name = name
        self.latest = self.latest_key = None
        self.censuses.clear()


listeners: list[Callable[[Census], None]] = []
"""Told of the census of every region that ends as it should, while they stand here (fastac.verify)."""

_blocks: dict[int, BlockRecord] = {}  # by id: a WeakKeyDictionary costs ten times as much per region
_kinds: weakref.WeakKeyDictionary[Any, dict[Any, Census]] = weakref.WeakKeyDictionary()


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


_RUNS_ITS_BLOCK = ("__call__", "_wrapped_call_impl", "forward")


def block_of(function: Any) -> torch.nn.Module | None:
    """The block that is run by a function: a module, or its forward. Another method may run any of several layers."""
    if isinstance(function, torch.nn.Module):
        return inside(function)  # type: ignore[no-any-return]
    return module_of(function) if getattr(function, "__name__", "") in _RUNS_ITS_BLOCK else None


def block_record(function: object) -> BlockRecord | None:
    """What is known about a block; None for any other function, of which nothing is kept."""
    block = block_of(function)
    if block is None:
        return None
    key = id(block)
    record = _blocks.get(key)
    if record is None or record.block() is not block:
        record = _blocks[key] = BlockRecord(weakref.ref(block, functools.partial(_forget, key)))
    return record


def _forget(key: int, gone: weakref.ref[torch.nn.Module]) -> None:
    record = _blocks.get(key)
    if record is not None and record.block is gone:  # else the id was given to another block already
        del _blocks[key]


def known(function: Any) -> dict[Any, Census]:
    """Censuses by policy and input signature, of the class of a block or the code of a function."""
    kind = _kind(function)
    censuses = _kinds.get(kind)
    if censuses is None:
        censuses = _kinds[kind] = {}
    return censuses


def _kind(function: Any) -> Any:
    while True:
        block = block_of(function)
        if block is not None:
            return type(getattr(block, "_orig_mod", block))
        if isinstance(function, types.MethodType):
            return function.__func__
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # partial, decorator
        if inner is None:
            return getattr(function, "__code__", type(function))
        function = inner


def describe(function: Any) -> str:
    """A block's qualified name where fastac.enable saw it, else its class, for messages."""
    block = block_of(function)
    record = block_record(function)
    if record is not None and record.name:
        return record.name
    return getattr(function, "__qualname__", None) or type(block if block is not None else function).__name__


def signature(value: Any) -> Any:
    """What of a region's inputs decides which attention calls it makes: shapes, dtypes, flags, structure."""
    if isinstance(value, (tuple, list)):
        return tuple([(v.shape, v.dtype) if isinstance(v, torch.Tensor) else signature(v) for v in value])
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple([(key, signature(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)  # a number may change with every step
