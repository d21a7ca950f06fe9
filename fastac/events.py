"""What a simulated step is made of: allocations, in segments, and the outputs of blocks that could be saved."""

from __future__ import annotations

import dataclasses

START, FORWARD, LOSS, BACKWARD, RECOMPUTE = "start", "forward", "loss", "backward", "recompute"
"""Kinds of segment: before the blocks, from a block's forward on, after the forward, from a block's backward on; and
phases of FLOPs."""

Place = tuple[str, int]
"""A region, and which of its candidates. A region has the name of its block; from a second call on, with "#2", ..."""

EXCHANGED = "exchanged"
"""The candidate that stands behind an attention under context parallelism: what its collectives return."""


@dataclasses.dataclass(frozen=True)
class Split:
    """One rank of Ulysses context parallelism: what is simulated is its part of the tokens.

    Attention over the `tokens` of the video that the rank has, or more, is over those of all `ranks`, with its part of
    the heads: as many bytes, more FLOPs. Query, key, value and output go through an all-to-all each.
    """

    ranks: int = 1
    tokens: int = 0

    def keys(self, keys: int) -> int:
        """Over how many keys an attention is that is simulated over so many."""
        return keys + (self.ranks - 1) * self.tokens if self.concerns(keys) else keys

    def concerns(self, keys: int) -> bool:
        """Whether an attention over so many keys is over the video, and not the text alone."""
        return self.ranks > 1 and keys >= self.tokens


@dataclasses.dataclass
class Candidate:
    """One output of a block that could be saved: of an attention call (keys > 0), or of a matrix product.

    name: of the Linear module, or of the attention op; "" for a product outside Linear modules. bytes: what it holds
    from the forward to recompute when it is saved. flops: of its recompute, 0 where that ends before it.
    """

    name: str
    keys: int = 0
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass
class Event:
    """Bytes that are allocated at one moment; freed, below 0.

    change: what they are more where the candidate is saved. gradient: it is the gradient of a parameter.
    """

    bytes: int
    candidate: Place | None = None
    change: int = 0
    gradient: bool = False


@dataclasses.dataclass
class Segment:
    """What happens from one mark to the next. flops: by phase."""

    kind: str
    block: str = ""
    events: list[Event] = dataclasses.field(default_factory=list)
    flops: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Simulation:
    """One simulated step. candidates: by block, in the order of their calls."""

    segments: list[Segment]
    candidates: dict[str, list[Candidate]]
