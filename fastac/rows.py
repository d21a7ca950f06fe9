"""What a catalogue is written in: rows for ops, and what is to be known about a library.

A row is data. It names an op by a namespace pattern and a name, and says what fastac must know about its calls.
"""

from __future__ import annotations

import dataclasses
import re
from enum import Enum

from fastac.errors import FastacError

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
    backward: name of the op, in the same namespace, that runs the backward; its first four tensors are the gradient of
    the output, query, key and value. "" where there is none that the dispatcher sees. This and what follows, to
    `blocks`, is for FLOPs.
    offsets: of packed sequences, the arguments that say where those of queries and of keys begin, and the last one ends
    (cu_seqlens); or the masks, (batch, sequence), of what is no padding.
    blocks: of sparse attention, the arguments that say which blocks of keys each block of queries attends to: lists,
    (batch, heads, blocks of queries, longest), and how many count in each; or one map, with all blocks of keys last.
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
    backward: str = ""
    offsets: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
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

    It returns values and their indices along `dim`. What it chose among floating-point numbers is kept in every region
    that keeps attention: a recompute that chose otherwise would meet outputs of other blocks.
    keeps_values: for an op whose values are added up until there are enough. Else they are taken from the recomputed
    tensor, with which they are compared.
    """

    namespace: str
    name: str
    keeps_values: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveOp:
    """One functional collective of torch: it writes none of its arguments.

    kind: of KINDS.
    """

    namespace: str
    name: str
    kind: str = "exchange"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOp:
    """One dispatcher op that a Linear module ends in. Part of the engine: nobody registers one."""

    namespace: str
    name: str


KINDS = {
    "exchange": "returns no more than it was given: saved, so that it is not issued again",
    "gather": "returns a multiple of what it was given, such as unsharded weights: issued again, never saved",
    "wait": "completes another collective: waiting again for what is complete costs nothing",
}
"""What a collective does -> what that means for its outputs."""

Row = AttentionOp | DecompositionOp | SelectionOp | CollectiveOp | LinearOp


def check_row(row: Row) -> None:
    """Raise FastacError when a row is not well-formed."""
    if not isinstance(row, (AttentionOp, DecompositionOp, SelectionOp, CollectiveOp)):
        raise FastacError(f"register: expected a fastac.AttentionOp, got {type(row).__name__}: {row!r}")
    for field in dataclasses.fields(row):
        allowed = (str, type(None)) if "None" in str(field.type) else str
        value = getattr(row, field.name)
        if str(field.type).startswith("str") and not isinstance(value, allowed):
            raise FastacError(f"register: {field.name} is no text in {row!r}")
        if str(field.type).startswith("tuple") and not (
            isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        ):
            raise FastacError(f"register: {field.name} is no tuple of texts in {row!r}")
        if field.type == "bool" and not isinstance(value, bool):
            raise FastacError(f"register: {field.name} is neither True nor False in {row!r}")
    try:
        re.compile(row.namespace)
    except re.error as error:
        raise FastacError(f"register: namespace {row.namespace!r} is not a regular expression: {error}") from error
    if not row.name.isidentifier():
        raise FastacError(
            f"register: name {row.name!r} is not the bare name of an op. Write it without namespace and overload: "
            f'AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward")'
        )
    if isinstance(row, CollectiveOp) and row.kind not in KINDS:
        raise FastacError(f"register: kind {row.kind!r} of {row.name} is none of {', '.join(KINDS)}")
    if not isinstance(row, AttentionOp):
        return
    if row.layout not in KEYS_DIMENSION:
        raise FastacError(f"register: layout {row.layout!r} of {row.name} is none of {', '.join(KEYS_DIMENSION)}")
    if row.backward and not row.backward.isidentifier():
        raise FastacError(
            f"register: backward {row.backward!r} of {row.name} is not the bare name of an op. Write it without "
            f"namespace and overload: the namespace is that of the forward."
        )
    check_offsets(row.offsets, f"register: offsets of {row.name}")
    if len(row.blocks) > 1 and not row.coarse:
        raise FastacError(
            f"register: {row.name} names lists of blocks, and no `coarse`: how many there are in all is not known"
        )


def check_offsets(offsets: tuple[str, ...], what: str) -> None:
    """Raise FastacError when they are not those of queries and those of keys."""
    if len(offsets) not in (0, 2):
        raise FastacError(f"{what} are two arguments, of queries and of keys: got {offsets!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueFunction:
    """An autograd.Function whose forward is an attention that no dispatcher op shows; made visible once it is loaded.

    module: regular expression for the whole name of the module that holds it; name: of the class in that module.
    key, layout, max_kv, dropout, offsets, blocks: as in AttentionOp, of the arguments of its forward.
    """

    backend: str
    module: str
    name: str
    key: str = "k"
    layout: str = "bshd"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
    offsets: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


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
