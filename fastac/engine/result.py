"""What the forward of one region did, in numbers: for reports, and to be compared with later regions of its kind."""

from __future__ import annotations

import dataclasses

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
