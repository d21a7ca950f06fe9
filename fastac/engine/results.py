"""The result of a region: which calls it made, and what it holds."""

from __future__ import annotations

import dataclasses

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
