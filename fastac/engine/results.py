"""The result of a region: which calls it made, and what it holds. Regions of one kind should have the same result."""

from __future__ import annotations

import dataclasses
import operator
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
    """Bytes of memory that its stored outputs hold; 0 if it is recomputed."""
    extra_bytes: int = 0
    """The part of `saved_bytes` that only the backward of an opaque kernel needs."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The saved output of one Linear module of a region."""

    name: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class RegionResult:
    """The calls that the forward of one region made, and the bytes that it holds until backward."""

    attention_calls: tuple[tuple[BoundOp, int], ...]
    """Attention calls in order, op and number of keys. Later regions of the kind are compared with them."""
    calls: tuple[Call, ...]
    """The same calls, with what was saved of them."""
    products: tuple[Product, ...] = ()
    choice_bytes: int = 0
    """Bytes that the choices of sparse attention hold."""
    compiled: bool = False
    """The region ran code that torch.compile made."""
    unknown: tuple[str, ...] = ()
    """Ops and autograd.Functions that run again and that fastac does not know, if the region was observed."""
    writing: int = 0
    """Number of collectives that wrote a buffer of their caller, if the region was observed."""
    flops: int = 0
    """FLOPs of the forward; 0 if the region was not observed."""
    saved_flops: int = 0
    """The part of `flops` that the saved attention takes."""
    has_graph: bool = True
    """Autograd saved something. Otherwise, as of a frozen block, the region holds nothing and never runs again."""

    @property
    def ops(self) -> tuple[BoundOp, ...]:
        """The ops that its attention calls called."""
        return tuple(op for op, _ in self.attention_calls)

    @property
    def count(self) -> int:
        """Number of calls that a policy may save."""
        return len(self.attention_calls) + len(self.products)


@dataclasses.dataclass
class Communication:
    """Numbers of the collectives of one region, and bytes that they returned on this rank."""

    # Collectives of the forward; how many of these are saved; collectives of recompute.
    issued: int = 0
    issued_bytes: int = 0
    saved: int = 0
    saved_bytes: int = 0
    again: int = 0
    again_bytes: int = 0

    def __add__(self, other: Communication) -> Communication:
        """The sums of both."""
        return Communication(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def count(self, how: str, outputs: Any) -> None:
        """Count a collective, and the bytes of its outputs. how: "issued", "saved" or "again"."""
        size = sum(output.nbytes for output in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))
        for name, more in ((how, 1), (f"{how}_bytes", size)):
            setattr(self, name, getattr(self, name) + more)


@dataclasses.dataclass
class Transfers:
    """Copies of one region between the device and the host."""

    host_bytes: int = 0
    """Bytes that are held on the host."""
    device_bytes: int = 0
    """Bytes that are held on the device."""
    copies: int = 0
    """Copies that were begun. All copies of one region in one direction count as one."""
    waits: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)
    """Copies that computation waited for: the transport, what its `wait` returned, bytes."""

    def waited_bytes(self) -> tuple[int, ...]:
        """Bytes of each copy for which the device was idle. Waits for the device."""
        return tuple(size for transport, waiting, size in self.waits if transport.had_to_wait(waiting))


@dataclasses.dataclass(eq=False)
class Kind:
    """Regions of one block class (or code), one policy and one input signature."""

    key: tuple[object, ...]
    """Policy, signatures of the arguments, and the classes of the modules that a function holds."""
    first: RegionResult | None = None
    """The result of its first region. None until that has ended: the region is observed."""

    @property
    def is_judged(self) -> bool:
        """Whether its first region shows what the policy saves. Attention that is too short to be saved does not."""
        policy: Any = self.key[0]
        return self.first is not None and (not policy.min_kv or any(call.saved for call in self.first.calls))
