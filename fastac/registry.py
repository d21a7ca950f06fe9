"""Which dispatcher ops run an attention forward: rows, and one cached decision per op.

A row is data. It names an op by a namespace pattern and a name, and says what fastac must know about its call: where
the number of keys is, and whether the kernel draws random numbers. No library is imported to classify anything: an op
is looked up in the dispatcher, where it is once its library was loaded by somebody else.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from fastac import torch_internals
from fastac.errors import FastacError, UnsupportedBackendError

KEYS_DIMENSION = {"bshd": -3, "bhsd": -2, "thd": -3}
"""Layout of the key tensor (batch, sequence, heads, dim; thd is packed) -> its dimension that counts keys."""

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

    namespace: regular expression that must match the whole namespace (hub builds carry a build-specific one).
    layout: of the key tensor, a name in KEYS_DIMENSION; `key` is its argument.
    max_kv: argument that holds the number of keys where the layout is packed; used when it is not None in a call.
    dropout: the argument that makes the kernel draw random numbers, None for never, "always" when nobody knows.
    trains: False refuses the op with `note` as the reason.
    """

    backend: str
    namespace: str
    name: str
    layout: str = "bshd"
    key: str = "key"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
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


Row = AttentionOp | DecompositionOp


class ResolvedOp:
    """A row bound to one op of this process: reads calls by argument position.

    Raises FastacError when the op can not be saved: an argument it always writes, no tensor among its outputs, or an
    argument that the row names and the op lacks.
    """

    def __init__(self, op: torch._ops.OpOverload, row: Row) -> None:
        self.op = op
        self.redispatch = op.redispatch
        self.row = row
        self.generation = sys.maxsize  # its place among the intercepted ops, once it is one
        self.name = str(op)
        self.qualified_name = op._schema.name
        if op._schema.overload_name:
            self.qualified_name += "." + op._schema.overload_name
        self._positions = {argument.name: i for i, argument in enumerate(op._schema.arguments)}
        self._defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
        self.written: list[str] = []
        self.trains = not isinstance(row, AttentionOp) or row.trains
        self.may_draw = isinstance(row, AttentionOp) and row.dropout is not None
        if isinstance(row, AttentionOp):
            self._check_schema(row)
            self._key, self._dimension = self._positions[row.key], KEYS_DIMENSION[row.layout]

    def _check_schema(self, row: AttentionOp) -> None:
        schema = self.op._schema
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append(argument.name)
                if not isinstance(argument.type, torch.OptionalType):
                    raise FastacError(
                        f"register: {self.name} writes its argument {argument.name!r}. On replay the kernel does not "
                        f"run and the write would be missing, with wrong gradients. Register a functional op."
                    )
        if not any("Tensor" in str(output.type) for output in schema.returns):
            raise FastacError(f"register: {self.name} returns no tensor, so there is nothing to save: {schema}")
        named = [row.key, row.max_kv, None if row.dropout == ALWAYS else row.dropout]
        for name in named:
            if name is not None and name not in self._positions:
                raise FastacError(
                    f"register: the row of {self.name} names the argument {name!r}, which the op does not have. "
                    f"Its arguments are {', '.join(self._positions)}."
                )

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value a call has for an argument, however it was passed."""
        position = self._positions[name]
        if position < len(args):
            return args[position]
        return kwargs.get(name, self._defaults[name])

    def keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of keys each query of this call may attend to (a SymInt under a trace with dynamic shapes)."""
        row = self.row
        if isinstance(row, DecompositionOp):
            keys: int = args[row.scores].shape[-1]
            return keys
        if row.max_kv is not None:
            keys = self.argument(row.max_kv, args, kwargs)
            if keys is not None:
                return keys
        key = args[self._key] if self._key < len(args) else kwargs[row.key]
        return key.shape[self._dimension]  # type: ignore[no-any-return]

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the kernel may draw random numbers in this call."""
        dropout = self.row.dropout if isinstance(self.row, AttentionOp) else None
        if dropout is None or dropout == ALWAYS:
            return dropout is not None
        return bool(self.argument(dropout, args, kwargs))

    def check_trains(self) -> None:
        """Raise UnsupportedBackendError when the row says that the op has no backward."""
        if not self.trains:
            note = getattr(self.row, "note", "") or "its row says so"
            raise UnsupportedBackendError(
                f"{self.name} does not train: {note}. Use another attention backend; `fastac backends` lists them."
            )

    def check_writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise FastacError when this call passes a tensor that the kernel writes."""
        for name in self.written:
            if self.argument(name, args, kwargs) is not None:
                raise FastacError(
                    f"{self.name} was called with {name!r}, which it writes. A saved call does not run again, so the "
                    f'write would be missing in recompute. Call it without {name!r}, or use policy="full".'
                )


@dataclasses.dataclass(frozen=True)
class BackendUse:
    """Which backend the attention of one module uses, and what fastac can do for it.

    family: the `backend` of the rows that serve it, for savable backends; op: the one op among them it ends in.
    """

    module: str
    backend: str
    verdict: Verdict
    reason: str = ""
    family: str = ""
    op: str = ""


BackendReader = Callable[[torch.nn.Module], Iterable[BackendUse]]

after_registration: list[Callable[[], object]] = []
"""Called when rows came in. Interception listens once it began: a row that comes later must count, too."""

_rows: list[Row] = []
_readers: list[BackendReader] = []
_decisions: dict[object, ResolvedOp | None] = {}


def rows() -> tuple[Row, ...]:
    """Every registered row, in the order of registration."""
    return tuple(_rows)


def register(*new_rows: Row) -> None:
    """Add rows; already loaded ops are checked at once, others when they are first met.

    Raises FastacError for a row that is not well-formed, that stands already, or whose op can not be saved. Nothing
    is registered then.
    """
    before = list(_rows)
    try:
        for row in new_rows:
            _check_row(row)
            _rows.append(row)
        _decisions.clear()
        present_ops()
        for listener in after_registration:
            listener()
    except FastacError:
        _rows[:] = before
        _decisions.clear()
        raise


def _check_row(row: Row) -> None:
    if not isinstance(row, (AttentionOp, DecompositionOp)):
        raise FastacError(f"register: expected a fastac.AttentionOp, got {type(row).__name__}: {row!r}")
    try:
        re.compile(row.namespace)
    except re.error as error:
        raise FastacError(f"register: namespace {row.namespace!r} is not a regular expression: {error}") from error
    if not row.name.isidentifier():
        raise FastacError(
            f"register: name {row.name!r} is not the bare name of an op. Write it without namespace and overload: "
            f'AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward")'
        )
    if isinstance(row, AttentionOp) and row.layout not in KEYS_DIMENSION:
        raise FastacError(f"register: layout {row.layout!r} of {row.name} is none of {', '.join(KEYS_DIMENSION)}")
    if any((row.namespace, row.name) == (other.namespace, other.name) for other in _rows):
        raise FastacError(f"register: there is a row for {row.namespace}::{row.name} already")


def _row_of(namespace: str, name: str) -> Row | None:
    found = [row for row in _rows if row.name == name and re.fullmatch(row.namespace, namespace)]
    if len(found) > 1:
        raise FastacError(
            f"register: {namespace}::{name} is claimed by {len(found)} rows: "
            + "; ".join(f"{row.namespace}::{row.name}" for row in found)
        )
    return found[0] if found else None


def classify(op: object) -> ResolvedOp | None:
    """The row of an op, or None for an op fastac has nothing to say about. Answered from a dict after the first time.

    op: an OpOverload; anything else (a higher-order op) has no row.
    """
    try:
        return _decisions[op]
    except KeyError:
        pass
    decision = None
    if isinstance(op, torch._ops.OpOverload):
        row = _row_of(*op._schema.name.split("::"))
        decision = ResolvedOp(op, row) if row is not None else None
    _decisions[op] = decision
    return decision


def present_ops() -> list[ResolvedOp]:
    """Every op of this process that a row names, all overloads."""
    names = {row.name for row in _rows}
    found = []
    for qualified in torch_internals.op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if name not in names or _row_of(namespace, name) is None:
            continue
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        except AttributeError:
            continue  # an implementation came before its definition: it is no op yet
        resolved = classify(op)
        if resolved is not None:
            found.append(resolved)
    return found


def register_reader(reader: BackendReader) -> None:
    """Add a function that tells which backends a model's attention modules are set to, by model library."""
    _readers.append(reader)


def backend_uses(module: torch.nn.Module) -> list[BackendUse]:
    """What is known, without running it, about the backend of every attention module inside a module."""
    return [use for reader in _readers for use in reader(module)]
