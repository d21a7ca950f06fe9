"""Values of calls with a row: metadata that recompute must repeat, and the results of regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fastac.registry import BoundOp


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call of a region."""

    op: str
    keys: int
    saved: bool
    saved_bytes: int
    """Bytes of memory that its kept outputs hold; 0 when it is recomputed."""
    extra_bytes: int = 0
    """Of saved_bytes, those that only the backward of an opaque kernel needs."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The saved output of one Linear module of a region."""

    name: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class RegionResult:
    """Calls of the forward of one region, and bytes that it keeps."""

    attention_calls: tuple[tuple[BoundOp, int], ...]
    """Attention calls in order, op and number of keys. Later regions of the kind are compared with them."""
    calls: tuple[Call, ...]
    """The same calls."""
    products: tuple[Product, ...] = ()
    choice_bytes: int = 0
    """Bytes that the choices of sparse attention hold."""
    compiled: bool = False
    """It ran code that torch.compile made."""
    unknown: tuple[str, ...] = ()
    """Ops and autograd.Functions that run again and that fastac does not know, where the region was watched."""
    writing: int = 0
    """Collectives that wrote a buffer of their caller, where the region was watched."""
    flops: int = 0
    """Of the forward; 0 where it was not watched."""
    saved_flops: int = 0
    """Of these, of the attention that is saved."""

    @property
    def ops(self) -> tuple[BoundOp, ...]:
        """The ops that its attention calls called."""
        return tuple(op for op, _ in self.attention_calls)

    @property
    def count(self) -> int:
        """Number of calls that a policy may save."""
        return len(self.attention_calls) + len(self.products)


@dataclasses.dataclass
class Transfers:
    """Copies of one region between the device and the host."""

    host_bytes: int = 0
    """Kept on the host."""
    device_bytes: int = 0
    """Kept on the device."""
    copies: int = 0
    """Copies that were begun. Those of one region in one direction count as one."""
    waits: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)
    """Copies that computation waited for: the transport, what its `wait` returned, bytes."""

    def waited_bytes(self) -> tuple[int, ...]:
        """Bytes of each copy for which the device was idle. Waits for the device."""
        return tuple(size for transport, waiting, size in self.waits if transport.had_to_wait(waiting))


def described(args: Sequence[Any]) -> list[Any]:
    """Metadata of a call's query, key and value, which recompute must repeat. Runs in every call, so kept cheap."""
    return [(a.shape, a.stride(), a.dtype) for a in args[:3] if isinstance(a, torch.Tensor)]


def inputs_of(args: Sequence[Any]) -> list[Any]:
    """The same for a collective: metadata of its tensors; its splits, operation and group."""
    first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return [one for i in range(0, len(first), 3) for one in described(first[i : i + 3])] + list(args[1:])


def readable(op: BoundOp, inputs: Sequence[Any], product: str) -> str:
    """A call in words. inputs: as above. product: the Linear module whose output it is, or ""."""
    parts = [
        f"{tuple(one[0])} {str(one[2]).removeprefix('torch.')} with strides {one[1]}"
        if isinstance(one, tuple) and one and isinstance(one[0], torch.Size)
        else str(one)
        for one in inputs
    ]
    return f"{op.name}({', '.join(parts)})" + f" of the Linear module {product!r}" * bool(product)
