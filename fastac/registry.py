"""Which ops fastac knows: rows, which are data, and the ops of this process that they stand for.

A row names an op by a namespace pattern and a name, and says what fastac must know about its calls. `classify` finds
the row of an op and remembers the decision. No library is imported for that: its ops are in the dispatcher once
somebody else has loaded it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.torch_private import Op, qualified_name
from fastac.errors import FastacError, UnsupportedBackendError

logger = logging.getLogger("fastac")

KEYS_DIMENSION = {"bshd": -3, "bhsd": -2, "thd": -3, "bs3hd": -4, "t3hd": -4}
"""Layout of the key tensor -> its dimension that counts keys.

b batch, s sequence, h heads, d dim, t the tokens of all sequences packed, 3 query, key and value in one tensor.
"""

ALWAYS = "always"

OPAQUE_NAMESPACE = "fastac_opaque"
"""Of the ops that fastac.make_visible makes."""

KINDS = {
    "attention": "runs an attention forward: its outputs are saved where the policy says so",
    "decomposition": "runs only where an attention was decomposed into small ops, so that nothing can be saved",
    "choice": "chooses blocks of sparse attention, as (values, indices): saved beside the attention that follows",
    "exchange": "a collective that returns no more than it was given: saved, so that it is not issued again",
    "gather": "a collective that returns a multiple of what it was given, such as unsharded weights: issued again",
    "wait": "completes a collective: waiting again for what is complete costs nothing",
    "linear": "the product that a Linear module ends in: saved where the policy names the module",
}
"""What a row's op does, and what that means for its outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One dispatcher op that fastac knows.

    Args:
        namespace: regular expression that must match the whole namespace (hub builds carry a build-specific one);
            "higher_order" for a higher-order op.
        name: the bare name of the op, without overload.
        kind: of KINDS.
    """

    namespace: str
    name: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """What only the counting of FLOPs needs to know of an attention op.

    Args:
        backward: name of the op, in the same namespace, that runs the backward; its first four tensors are the
            gradient of the output, query, key and value. "" where the dispatcher sees none.
        offsets: of packed sequences, the two arguments that say where those of queries and of keys begin, and the last
            one ends (cu_seqlens); or the masks, (batch, sequence), of what is no padding.
        blocks: of sparse attention, the arguments that say which blocks of keys each block of queries attends to:
            lists, (batch, heads, blocks of queries, longest), and how many count in each; or one map, with all blocks
            of keys last.
    """

    backward: str = ""
    offsets: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOp(Row):
    """One dispatcher op that runs an attention forward and returns its output and statistics.

    Args:
        backend: what it is called in reports, such as "fa2".
        namespace, name: of the op, see Row.
        layout: of the key tensor, a name in KEYS_DIMENSION.
        key: the argument that holds the key tensor.
        max_kv: argument that holds the number of keys where the layout is packed; used when it is not None in a call.
        dropout: the argument that makes the kernel draw random numbers, None for never, "always" when nobody knows.
        selection: of sparse attention, the arguments that hold the chosen blocks; they are saved with the outputs.
        coarse: of sparse attention, the argument with one entry per block of keys. Attention over that few keys, which
            it chooses its blocks by, is small ops and may be recomputed.
        with_argument: an argument by which the op is told from another library's op of the same namespace and name.
        trains: False refuses the op, with `note` as the reason.
        flops: what only the counting of FLOPs needs.

    Example:
        >>> fastac.register(fastac.AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward"))
    """

    kind: str = "attention"
    backend: str
    layout: str = "bshd"
    key: str = "key"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
    selection: tuple[str, ...] = ()
    coarse: str = ""
    with_argument: str = ""
    trains: bool = True
    note: str = ""
    flops: Flops = Flops()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueFunction:
    """An autograd.Function whose forward is an attention that no dispatcher op shows; made visible once it is loaded.

    Args:
        module: regular expression for the whole name of the module that holds it, in its __dict__.
        name: of the class in that module.
        backend, key, layout, max_kv, dropout, flops: as in AttentionOp, of the arguments of its forward.
    """

    backend: str
    module: str
    name: str
    key: str = "k"
    layout: str = "bshd"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
    flops: Flops = Flops()


class BoundOp:
    """A row bound to one op of this process: reads calls by argument position.

    Raises FastacError when the op cannot be saved: an argument it always writes, no tensor among its outputs, or an
    argument that the row names and the op lacks.
    """

    number = 0
    """Its place among the intercepted ops, from 1 on; 0 for one that is not intercepted."""

    def __init__(self, op: Op, row: Row) -> None:
        self.op = op
        self.redispatch = torch_private.redispatch_of(op)
        self.row = row
        self.kind = row.kind
        self.name = str(op)
        self.qualified_name = qualified_name(op)
        self.is_attention = isinstance(row, AttentionOp)
        self.backend = row.backend if isinstance(row, AttentionOp) else ""
        self.trains = not isinstance(row, AttentionOp) or row.trains
        self.may_draw = isinstance(row, AttentionOp) and row.dropout is not None
        self.selects = isinstance(row, AttentionOp) and bool(row.selection)
        self.is_opaque = self.is_attention and row.namespace == OPAQUE_NAMESPACE
        arguments = torch_private.arguments_of(op)
        self._positions = {argument.name: i for i, argument in enumerate(arguments)}
        self._defaults = {argument.name: argument.default for argument in arguments}
        self.written = [argument.name for argument in arguments if argument.written]
        if isinstance(row, AttentionOp):
            self._key, self._dimension = self._positions.get(row.key, 0), KEYS_DIMENSION[row.layout]
        if self.trains and row.kind != "decomposition":
            self._check_schema([argument.name for argument in arguments if argument.written and not argument.optional])

    def _check_schema(self, always_written: Sequence[str]) -> None:
        row = self.row
        if always_written:
            raise FastacError(
                f"register: {self.name} writes its argument {always_written[0]!r}. On replay the kernel does not run "
                f"and the write would be missing, with wrong gradients. Register a functional op."
            )
        if not torch_private.returns_tensors(self.op):
            raise FastacError(f"register: {self.name} returns no tensor, so there is nothing to save")
        if row.kind == "choice" and "dim" not in self._positions:
            raise FastacError(f"register: {self.name} has no argument 'dim', so it is no choice as topk and sort are")
        if not isinstance(row, AttentionOp):
            return
        named = [row.key, row.max_kv, None if row.dropout == ALWAYS else row.dropout, row.coarse, *row.selection]
        for name in (*named, *row.flops.offsets, *row.flops.blocks):
            if name and name not in self._positions:
                raise FastacError(
                    f"register: the row of {self.name} names the argument {name!r}, which the op does not have. "
                    f"Its arguments are {', '.join(self._positions)}: say which, as AttentionOp(key=...) does."
                )

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value a call has for an argument, however it was passed."""
        position = self._positions[name]
        return args[position] if position < len(args) else kwargs.get(name, self._defaults[name])

    def keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of keys each query of an attention call may attend to (a SymInt under a trace with dynamic shapes).

        Of a decomposed attention: that of its softmax, whose last dimension counts them. 0 for any other kind.
        """
        row = self.row
        if not isinstance(row, AttentionOp):
            return args[0].shape[-1] if row.kind == "decomposition" else 0
        if row.max_kv is not None:
            keys: int | None = self.argument(row.max_kv, args, kwargs)
            if keys is not None and keys >= 0:  # some libraries pass -1 where nothing is packed
                return keys
        key = args[self._key] if self._key < len(args) else kwargs[row.key]
        try:
            return key.shape[self._dimension]  # type: ignore[no-any-return]
        except IndexError:
            raise FastacError(
                f"{self.name}: by its row the layout of {row.key!r} is {row.layout!r}, and it was called with the "
                f"shape {tuple(key.shape)}. Give the row the argument that holds the keys (key=...) and their layout."
            ) from None

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the kernel may draw random numbers in this call."""
        dropout = self.row.dropout if isinstance(self.row, AttentionOp) else None
        if dropout is None or dropout == ALWAYS:
            return dropout is not None
        return bool(self.argument(dropout, args, kwargs))

    def selection(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
        """The tensors of a call that hold the blocks it was given to attend to."""
        names = self.row.selection if isinstance(self.row, AttentionOp) else ()
        return [self.argument(name, args, kwargs) for name in names]

    def coarse_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """How many keys the coarse attention has that goes with this call; 0 for a kernel that is not sparse."""
        name = self.row.coarse if isinstance(self.row, AttentionOp) else ""
        blocks = self.argument(name, args, kwargs) if name else None
        return 0 if blocks is None else int(blocks.numel())

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise FastacError when this call, which is to be saved, passes a tensor that the kernel writes."""
        for name in self.written:
            if self.argument(name, args, kwargs) is not None:
                raise FastacError(
                    f"{self.name} was called with {name!r}, which it writes. A saved call does not run again, so the "
                    f'write would be missing in recompute. Call it without {name!r}, or use policy="full".'
                )

    def check_trains(self) -> None:
        """Raise UnsupportedBackendError when the row says that the op has no backward."""
        if not self.trains:
            note = getattr(self.row, "note", "") or "its row says so"
            raise UnsupportedBackendError(
                f"{self.name} does not train: {note}. Use another attention backend; `fastac backends` lists them."
            )


class _State:
    """Everything that this module knows in this process."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forget decisions: ops are looked at anew."""
        self.decisions: dict[object, BoundOp | None] = {}
        self.reported: set[str] = set()


state = _State()


def rows() -> tuple[Row, ...]:
    """Every registered row, in the order of registration."""
    return tuple(state.rows)


def register(*new_rows: Row) -> None:
    """Add rows; ops that are loaded are checked at once, others when they are first met.

    Args:
        new_rows: such as `AttentionOp(...)`. All of them are added, or none.

    Raises:
        FastacError: a row is not well-formed, stands already, or its op cannot be saved. Nothing is registered then.

    Example:
        >>> fastac.register(fastac.AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward"))
    """
    with state.lock:
        before = list(state.rows)
        try:
            for row in new_rows:
                check_row(row)
                if any(_identity(row) == _identity(other) for other in state.rows):
                    raise FastacError(f"register: there is a row for {row.namespace}::{row.name} already")
                state.rows.append(row)
            state.reset()
            present_ops(strictly=new_rows)
        except FastacError:
            state.rows[:] = before
            state.reset()
            raise


def check_row(row: Row) -> None:
    """Raise FastacError when a row is not well-formed."""
    if not isinstance(row, Row):
        raise FastacError(f"register: expected a fastac.AttentionOp, got {type(row).__name__}: {row!r}")
    check_texts(row, "register")
    check_pattern(row.namespace, f"register: namespace of {row.name!r}")
    backward = row.flops.backward if isinstance(row, AttentionOp) else ""
    for name in (row.name, *[backward] * bool(backward)):
        if not name.isidentifier():
            raise FastacError(
                f"register: {name!r} is not the bare name of an op. Write it without namespace and overload: "
                f'AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward")'
            )
    if row.kind not in KINDS or (row.kind == "attention") is not isinstance(row, AttentionOp):
        raise FastacError(f"register: kind {row.kind!r} of {row.name} is none of {', '.join(KINDS)}")
    if isinstance(row, AttentionOp):
        check_layout(row.layout, row.flops, f"register: {row.name}")
        if len(row.flops.blocks) > 1 and not row.coarse:
            raise FastacError(f"register: {row.name} names lists of blocks, and no `coarse` that says how many exist")


def check_texts(row: Any, where: str) -> None:
    """Raise FastacError where a field of a row is not of the type that it is declared with."""
    declarations: Any = dataclasses.fields(row)
    for field in declarations:
        value, declared = getattr(row, field.name), str(field.type)
        if declared == "str | None" and value is None:
            continue
        kind: type = {"s": str, "t": tuple, "b": bool, "F": Flops}[declared[0]]
        if not isinstance(value, kind) or (isinstance(value, tuple) and not all(isinstance(i, str) for i in value)):
            raise FastacError(f"{where}: {field.name} is {value!r}, expected {declared}, in {row!r}")


def check_pattern(pattern: str, where: str) -> None:
    """Raise FastacError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise FastacError(f"{where}: {pattern!r} is not a regular expression: {error}") from error


def check_layout(layout: str, flops: Flops, where: str) -> None:
    """Raise FastacError for an unknown layout, and for offsets that are not those of queries and of keys."""
    if layout not in KEYS_DIMENSION:
        raise FastacError(f"{where}: layout {layout!r} is none of {', '.join(KEYS_DIMENSION)}")
    if len(flops.offsets) not in (0, 2):
        raise FastacError(f"{where}: offsets are two arguments, of queries and of keys: got {flops.offsets!r}")


def _identity(row: Row) -> tuple[str, str, str]:
    return row.namespace, row.name, getattr(row, "with_argument", "")


def _row_of(op: Op) -> Row | None:
    namespace, _, name = qualified_name(op).partition(".")[0].partition("::")
    found = []
    for row in state.rows:
        if row.name == name and re.fullmatch(row.namespace, namespace):
            argument = getattr(row, "with_argument", "")
            if not argument or any(argument == one.name for one in torch_private.arguments_of(op)):
                found.append(row)
    if len(found) > 1:
        raise FastacError(
            f"register: {namespace}::{name} is claimed by {len(found)} rows: "
            + "; ".join(f"{row.namespace}::{row.name} of {getattr(row, 'backend', 'fastac')}" for row in found)
        )
    if found and found[0].kind == "choice" and any(one.written for one in torch_private.arguments_of(op)):
        return None  # an overload with `out`: what it writes is the caller's own
    return found[0] if found else None


def classify(op: Any) -> BoundOp | None:
    """The row of an op, bound to it, or None for an op without a row. Answered from a dict after the first time.

    op: an OpOverload or a HigherOrderOperator; anything else has no row.
    """
    try:
        return state.decisions[op]
    except KeyError:
        pass
    decision = None
    if torch_private.is_op(op):
        row = _row_of(op)
        decision = BoundOp(op, row) if row is not None else None
    state.decisions[op] = decision
    return decision


def find_op(qualified: str) -> Op | None:
    """The op of a qualified name; None where an implementation came before its definition."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    try:
        op = getattr(getattr(torch.ops, namespace), name)
        return op if namespace == "higher_order" else getattr(op, overload or "default")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def present_ops(strictly: Collection[Row] = ()) -> list[BoundOp]:
    """Every op of this process that a row names, all overloads.

    One that cannot be saved is left out; it raises when one of the rows `strictly` is concerned.
    """
    rows_by_name: dict[str, list[Row]] = {}
    for row in state.rows:
        rows_by_name.setdefault(row.name, []).append(row)
    found = []
    for qualified in [*torch_private.op_names(), *(f"higher_order::{name}" for name in rows_by_name)]:
        namespace, _, rest = qualified.partition("::")
        mine = rows_by_name.get(rest.partition(".")[0], ())
        if not any(re.fullmatch(row.namespace, namespace) for row in mine):
            continue
        try:
            bound = classify(find_op(qualified))
        except FastacError as error:
            if any(row in strictly for row in mine):
                raise
            if str(error) not in state.reported:
                state.reported.add(str(error))
                logger.error("%s (left out: a region that calls the op raises)", error)
            continue
        if bound is not None:
            found.append(bound)
    return found
