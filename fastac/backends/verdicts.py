"""What is said of attention libraries, and of the backends that a model's modules are set to."""

from __future__ import annotations

import dataclasses
from enum import Enum


class Verdict(str, Enum):
    """What fastac can do for an attention backend."""

    SAVABLE = "savable"
    OPAQUE = "opaque"  # savable once make_visible gave its kernel a dispatcher op
    DECOMPOSED = "decomposed"  # many small ops: there is no attention output to save
    NOT_TRAINABLE = "not_trainable"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """What a user must know about one attention library.

    backend: of the rows that serve it. distribution: its name on the package index, "" for a part of torch.
    how: in which way its outputs are saved, or why they cannot be. advice: what the user does, "" for nothing.
    """

    backend: str
    name: str
    verdict: Verdict
    how: str
    distribution: str = ""
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class BackendUse:
    """Which backend the attention of one module uses, and what fastac can do for it.

    family: the `backend` of the rows that serve it, for savable ones; op: the one among their ops that it ends in.
    processor: the class that runs it. ignores: the backend that is set and that it does not heed.
    """

    module: str
    backend: str
    verdict: Verdict
    reason: str = ""
    family: str = ""
    op: str = ""
    processor: str = ""
    ignores: str = ""
