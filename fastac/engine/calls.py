"""Calls of ops with a row, as values: what of one must be alike in recompute, and what the forward of a region did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fastac.registry import BoundOp


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
class RegionResult:
    """What the forward of one region did: its attention calls in order, and what was kept beside them.

    made: the same calls as they are compared with later regions, by op and number of keys. choice_bytes: memory held
    by the choices of sparse attention. compiled: it runs code that torch.compile made. writing: how many collectives
    wrote a buffer of their caller's, as far as it was watched.
    """

    made: tuple[tuple[BoundOp, int], ...]
    calls: tuple[Call, ...]
    products: tuple[Product, ...] = ()
    choice_bytes: int = 0
    compiled: bool = False
    writing: int = 0
    flops: int = 0
    """Of the forward; 0 where it was not watched."""
    saved_flops: int = 0
    """Of these, of the attention that is saved."""


@dataclasses.dataclass
class Transfers:
    """What one region moved between the device and the host."""

    host_bytes: int = 0
    """Kept on the host."""
    device_bytes: int = 0
    """Kept on the device."""
    copies: int = 0
    """That were begun: those of one region in one direction are one."""
    waits: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)
    """For which of them computation waited: the transport, what it knows of the wait, bytes."""

    def waited_bytes(self) -> tuple[int, ...]:
        """Bytes of each of the copies that the device was idle for. Waits for the device."""
        return tuple(size for transport, waiting, size in self.waits if transport.had_to_wait(waiting))


def described(args: Sequence[Any]) -> list[Any]:
    """What of a call's query, key and value must be alike in forward and recompute: for every call, so kept cheap."""
    return [(a.shape, a.stride(), a.dtype) for a in args[:3] if isinstance(a, torch.Tensor)]


def inputs_of(args: Sequence[Any]) -> list[Any]:
    """What of a collective's arguments must be alike in forward and recompute: tensors, splits, operation, group."""
    first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return [one for i in range(0, len(first), 3) for one in described(first[i : i + 3])] + list(args[1:])


def readable(op: BoundOp, inputs: Sequence[Any], product: str, strides: bool = False) -> str:
    """A call in words, for messages. inputs: as above. product: the Linear module whose output it is, or ""."""
    parts = [
        f"{tuple(one[0])} {str(one[2]).removeprefix('torch.')}" + f" with strides {one[1]}" * strides
        if isinstance(one, tuple) and one and isinstance(one[0], torch.Size)
        else str(one)
        for one in inputs
    ]
    return f"{op.name}({', '.join(parts)})" + f" of the Linear module {product!r}" * bool(product)
