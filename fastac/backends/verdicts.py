"""What fastac can do for an attention library, and what a user must know about it."""

from __future__ import annotations

import dataclasses
from enum import Enum


class Verdict(str, Enum):
    """What fastac can do for an attention backend."""

    SAVABLE = "savable"
    OPAQUE = "opaque"  # savable once make_visible has given its kernel a dispatcher op
    DECOMPOSED = "decomposed"  # runs as many small ops: there is no attention output to save
    NOT_TRAINABLE = "not_trainable"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """What a user must know about one attention library."""

    backend: str
    """The `backend` of the rows that serve it."""
    name: str
    verdict: Verdict
    how: str
    """How its outputs are saved, or why they cannot be."""
    distribution: str = ""
    """Its name on the package index; "" for a part of torch."""
    advice: str = ""
    """What the user should do; "" for nothing."""
