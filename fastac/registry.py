"""Which ops run an attention forward: the registered rows, and one cached decision per op.

No library is imported to classify an op: it is in the dispatcher once its library was loaded by somebody else.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastac import dispatcher_internals
from fastac.errors import FastacError, UnsupportedBackendError
from fastac.rows import (
    ALWAYS,
    KEYS_DIMENSION,
    AttentionOp,
    CollectiveOp,
    DecompositionOp,
    LinearOp,
    Row,
    SelectionOp,
    Verdict,
    check_row,
)

Op = torch._ops.OpOverload | torch._ops.HigherOrderOperator


def qualified_name(op: Op) -> str:
    """`namespace::name`, with `.overload` where it has one."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return f"{op.namespace}::{op.name()}"
    name: str = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


class ResolvedOp:
    """A row bound to one op of this process: reads calls by argument position.

    Raises FastacError when the op can not be saved: an argument it always writes, no tensor among its outputs, or an
    argument that the row names and the op lacks.
    """

    def __init__(self, op: Op, row: Row) -> None:
        self.op = op
        self.redispatch = dispatcher_internals.redispatch_of(op)
        self.row = row
        self.name = str(op)
        self.qualified_name = qualified_name(op)
        arguments = dispatcher_internals.arguments_of(op)
        self._positions = {argument.name: i for i, argument in enumerate(arguments)}
        self._defaults = {argument.name: argument.default for argument in arguments}
        self.written: list[str] = []
        self.trains = not isinstance(row, AttentionOp) or row.trains
        self.may_draw = isinstance(row, AttentionOp) and row.dropout is not None
        self.is_attention = isinstance(row, AttentionOp)
        self.is_collective = isinstance(row, CollectiveOp)
        self.is_linear = isinstance(row, LinearOp)
        self.has_selection = isinstance(row, AttentionOp) and bool(row.selection)
        if self.trains and not isinstance(row, DecompositionOp):
            self._check_schema(row, arguments)
        if isinstance(row, AttentionOp):
            self._key, self._dimension = self._positions.get(row.key, 0), KEYS_DIMENSION[row.layout]

    def _check_schema(self, row: Row, arguments: Sequence[dispatcher_internals.Argument]) -> None:
        for argument in arguments:
            if argument.written:
                self.written.append(argument.name)
                if not argument.optional:
                    raise FastacError(
                        f"register: {self.name} writes its argument {argument.name!r}. On replay the kernel does not "
                        f"run and the write would be missing, with wrong gradients. Register a functional op."
                    )
        if not dispatcher_internals.returns_tensors(self.op):
            raise FastacError(f"register: {self.name} returns no tensor, so there is nothing to save")
        if not isinstance(row, AttentionOp):
            return
        named = [row.key, row.max_kv, None if row.dropout == ALWAYS else row.dropout, row.coarse]
        for name in (*named, *row.selection, *row.offsets, *row.blocks):
            if name and name not in self._positions:
                raise FastacError(
                    f"register: the row of {self.name} names the argument {name!r}, which the op does not have. "
                    f"Its arguments are {', '.join(self._positions)}."
                )

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value a call has for an argument, however it was passed."""
        position = self._positions[name]
        return args[position] if position < len(args) else kwargs.get(name, self._defaults[name])

    def keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of keys each query of this call may attend to (a SymInt under a trace with dynamic shapes)."""
        row = self.row
        if isinstance(row, (SelectionOp, CollectiveOp, LinearOp)):
            raise TypeError(f"{self.name} is no attention, and attends to no keys")
        if isinstance(row, DecompositionOp):
            return args[row.scores].shape[-1]  # type: ignore[no-any-return]
        if row.max_kv is not None:
            keys: int | None = self.argument(row.max_kv, args, kwargs)
            if keys is not None and keys >= 0:  # some libraries pass -1 where nothing is packed
                return keys
        key = args[self._key] if self._key < len(args) else kwargs[row.key]
        return key.shape[self._dimension]  # type: ignore[no-any-return]

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the kernel may draw random numbers in this call."""
        dropout = self.row.dropout if isinstance(self.row, AttentionOp) else None
        if dropout is None or dropout == ALWAYS:
            return dropout is not None
        return bool(self.argument(dropout, args, kwargs))

    def selection(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
        """The tensors of a call that hold the blocks it was told to attend to."""
        names = self.row.selection if isinstance(self.row, AttentionOp) else ()
        return [self.argument(name, args, kwargs) for name in names]

    def coarse_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """How many keys the coarse attention has that goes with this call; 0 for a kernel that is not sparse."""
        name = self.row.coarse if isinstance(self.row, AttentionOp) else ""
        blocks = self.argument(name, args, kwargs) if name else None
        return 0 if blocks is None else int(blocks.numel())

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

    family: the `backend` of the rows that serve it, for savable ones; op: the one among their ops that it ends in.
    processor: the class that runs it. linear: linear attention, which has no kernel to save. cross: it is known to
    attend to something else than its own input. ignores: the backend that is set and that it does not look at.
    """

    module: str
    backend: str
    verdict: Verdict
    reason: str = ""
    family: str = ""
    op: str = ""
    processor: str = ""
    linear: bool = False
    cross: bool = False
    ignores: str = ""


BackendReader = Callable[[torch.nn.Module], Iterable[BackendUse]]

after_registration: list[Callable[[], object]] = []
"""Called when rows came in: for their FLOPs, and by interception once it began, as a later row must count, too."""

logger = logging.getLogger("fastac")

_rows: list[Row] = []
_registering = threading.RLock()
_readers: list[BackendReader] = []
_told: set[str] = set()
_decisions: dict[object, ResolvedOp | None] = {}


def rows() -> tuple[Row, ...]:
    """Every registered row, in the order of registration."""
    return tuple(_rows)


def register(*new_rows: Row) -> None:
    """Add rows; already loaded ops are checked at once, others when they are first met.

    Raises FastacError for a row that is not well-formed, that stands already, or whose op can not be saved. Nothing
    is registered then.
    """
    added: list[Row] = []
    try:
        with _registering:
            for row in new_rows:
                check_row(row)
                if any(_place(row) == _place(other) for other in _rows):
                    raise FastacError(f"register: there is a row for {row.namespace}::{row.name} already")
                _rows.append(row)
                added.append(row)
            _decisions.clear()
            present_ops(strictly=new_rows)
        for listener in after_registration:  # not under the lock: a listener has one of its own
            listener()
    except FastacError:
        with _registering:
            _rows[:] = [row for row in _rows if not any(row is mine for mine in added)]
            _decisions.clear()
        raise


def _place(row: Row) -> tuple[str, str, str]:
    return row.namespace, row.name, getattr(row, "with_argument", "")


def _row_of(op: Op) -> Row | None:
    namespace, _, name = qualified_name(op).partition(".")[0].partition("::")
    found = []
    for row in _rows:
        if row.name == name and re.fullmatch(row.namespace, namespace):
            told_by = getattr(row, "with_argument", "")
            if not told_by or any(argument.name == told_by for argument in dispatcher_internals.arguments_of(op)):
                found.append(row)
    if len(found) > 1:
        raise FastacError(
            f"register: {namespace}::{name} is claimed by {len(found)} rows: "
            + "; ".join(f"{row.namespace}::{row.name} of {getattr(row, 'backend', 'fastac')}" for row in found)
        )
    if found and isinstance(found[0], SelectionOp) and any(a.written for a in dispatcher_internals.arguments_of(op)):
        return None  # an overload with `out`: what it writes is the caller's own
    return found[0] if found else None


def classify(op: object) -> ResolvedOp | None:
    """The row of an op, or None for an op fastac has nothing to say about. Answered from a dict after the first time.

    op: an OpOverload or a HigherOrderOperator; anything else has no row.
    """
    try:
        return _decisions[op]
    except KeyError:
        pass
    decision = None
    if isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        row = _row_of(op)
        decision = ResolvedOp(op, row) if row is not None else None
    _decisions[op] = decision
    return decision


def find_op(qualified: str) -> Op | None:
    """The op of a qualified name, as it is now; None where an implementation came before its definition."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    try:
        op = getattr(getattr(torch.ops, namespace), name)
        return op if namespace == "higher_order" else getattr(op, overload or "default")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def present_ops(strictly: Collection[Row] = ()) -> list[ResolvedOp]:
    """Every op of this process that a row names, all overloads.

    One that can not be saved is left out; it raises when one of the rows `strictly` is concerned.
    """
    rows_by_name: dict[str, list[Row]] = {}
    for row in _rows:
        rows_by_name.setdefault(row.name, []).append(row)
    found = []
    for qualified in [*dispatcher_internals.op_names(), *(f"higher_order::{name}" for name in rows_by_name)]:
        namespace, _, rest = qualified.partition("::")
        if not any(re.fullmatch(row.namespace, namespace) for row in rows_by_name.get(rest.partition(".")[0], ())):
            continue
        op = find_op(qualified)
        try:
            resolved = classify(op)
        except FastacError as error:
            if any(row in strictly for row in rows_by_name[rest.partition(".")[0]]):
                raise
            if str(error) not in _told:
                _told.add(str(error))
                logger.error("%s (left out: a region that calls the op raises)", error)
            continue
        if resolved is not None:
            found.append(resolved)
    return found


def register_reader(reader: BackendReader) -> None:
    """Add a function that tells which backends a model's attention modules are set to, by model library."""
    _readers.append(reader)


def backend_uses(module: torch.nn.Module) -> list[BackendUse]:
    """What is known, without running it, about the backend of every attention module inside a module."""
    return [use for reader in _readers for use in reader(module)]
