"""What a catalogue is written in: rows for ops, and what is to be known about a library.

A row is data. It names an op by a namespace pattern and a name, and says what fastac must know about its calls.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

KEYS_DIMENSION = {"bshd": -3, "bhsd": -2, "thd": -3, "bs3hd": -4, "t3hd": -4}
"""Layout of the key tensor -> its dimension that counts keys.

b batch, s sequence, h heads, d dim, t the tokens of all sequences packed, 3 query, key and value in one tensor.
"""

ALWAYS = "always"


class Verdict(str, Enum):
    """What fastac can do for an attention backend."""

    SAVABLE = "savable"
    OPAQUE = "opaque"  # savable once make_visible gave its kernel a dispatcher op
    DECOMPOSED = "decomposed"  # many small ops: there is no attention output to save
    NOT_TRAINABLE = "not_trainable"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """One dispatcher op that runs an attention forward and returns its output and statistics.

    namespace: regular expression that must match the whole namespace (hub builds carry a build-specific one);
    "higher_order" for a higher-order op.
    layout: of the key tensor, a name in KEYS_DIMENSION; `key` is its argument.
    max_kv: argument that holds the number of keys where the layout is packed; used when it is not None in a call.
    dropout: the argument that makes the kernel draw random numbers, None for never, "always" when nobody knows.
    selection: of sparse attention, the arguments that hold the chosen blocks; they are saved with the outputs.
    coarse: of sparse attention, the argument with one entry per block of keys. Attention over that few keys, which it
    chooses its blocks by, is small ops and may be recomputed.
    with_argument: an argument by which the op is told from another library's op of the same namespace and name.
    trains: False refuses the op with `note` as the reason.
    """

    backend: str
    namespace: str
    name: str
    layout: str = "bshd"
    key: str = "key"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
    selection: tuple[str, ...] = ()
    coarse: str = ""
    with_argument: str = ""
    trains: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecompositionOp:
    """One dispatcher op that runs only where an attention call was decomposed into small ops.

    scores: its argument with the attention scores; their last dimension counts the keys.
    """

    attention: str
    namespace: str
    name: str
    scores: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionOp:
    """One dispatcher op that sparse attention chooses its blocks with.

    Its outputs are saved whenever attention is: a recompute that chose otherwise would meet outputs of other blocks.
    """

    namespace: str
    name: str


Row = AttentionOp | DecompositionOp | SelectionOp


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueFunction:
    """An autograd.Function whose forward is an attention that no dispatcher op shows; made visible once it is loaded.

    module: regular expression for the whole name of the module that holds it; name: of the class in that module.
    key, layout, max_kv, dropout: as in AttentionOp, of the arguments of its forward.
    """

    backend: str
    module: str
    name: str
    key: str = "k"
    layout: str = "bshd"
    max_kv: str | None = None
    dropout: str | None = ALWAYS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """What a user must know about one attention library.

    backend: of the rows that serve it. distribution: its name on the package index, "" for a part of torch.
    how: in which way its outputs are saved, or why they can not be. advice: what the user does, "" for nothing.
    """

    backend: str
    name: str
    verdict: Verdict
    how: str
    distribution: str = ""
    advice: str = ""
