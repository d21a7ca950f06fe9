"""The ops that fastac knows: rows, which are data, and the ops of this process that they name.

A row names an op by a namespace pattern and a name, and says how to read its calls. `classify` finds the row of an op
and remembers it. No library is imported for that: its ops are in the dispatcher once the user has loaded it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastac.errors import FastacError, UnsupportedBackendError
from fastac.registry import torch_private
from fastac.registry.torch_private import Op, name_of, qualified_name

logger = logging.getLogger("fastac")

KEYS_DIMENSION = {"bshd": -3, "bhsd": -2, "thd": -3, "bs3hd": -4, "t3hd": -4}
"""Layout of the key tensor -> its dimension that counts keys.

b batch, s sequence, h heads, d dim, t the tokens of all sequences packed, 3 query, key and value in one tensor.
"""

ALWAYS = "always"
"""`dropout` of a row if its kernel draws random numbers in every call, or if nobody knows."""

# Part of op names that users see in reports and profiles, and that compiler caches on disk contain: do not rename it.
OPAQUE_NAMESPACE = "fastac_opaque"
"""Namespace of the ops that fastac.make_visible makes."""

KINDS = ("attention", "decomposition", "choice", "exchange", "gather", "wait", "linear", "other")
"""Kinds of rows (see Row)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One dispatcher op that fastac knows.

    Args:
        namespace: regular expression for the whole namespace (each build from the hub has its own); "higher_order" for
            a higher-order op. For kind "other" it may also match the module of an autograd.Function.
        name: the bare name of the op, without overload; or the name of the Function.
        kind: what the op does, and what happens to its outputs; one of KINDS.
            "attention": runs an attention forward. Saved if the policy says so.
            "decomposition": runs only if an attention is decomposed into small ops. Nothing can be saved.
            "choice": chooses blocks of sparse attention, as (values, indices). Saved beside the attention that follows.
            "exchange": a collective that returns no more than its input. Saved, and not issued again.
            "gather": a collective that returns a multiple of its input, such as unsharded weights. Issued again.
            "wait": completes a collective. Runs again, which costs nothing once the collective is complete.
            "linear": the matmul of a Linear module. Saved if the policy names the module.
            "other": an op or autograd.Function that is not an attention, whatever its name says. Runs again.

    Example:
        >>> fastac.register(fastac.Row(namespace="my_kernels", name="attn_rope", kind="other"))
    """

    namespace: str
    name: str
    kind: str

    def names(self, namespace: str, name: str) -> bool:
        """Whether it is a row for an op of this namespace and bare name, or for a Function of this module and name."""
        return self.name == name and re.fullmatch(self.namespace, namespace) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Arguments and backward of an attention op. Only FLOP counting reads them.

    Args:
        backward: name of the op, in the same namespace, that runs the backward. Its first four tensors are the
            gradient of the output, query, key and value. "" if the dispatcher does not see the backward.
        offsets: for packed sequences, the two arguments with the offsets of queries and of keys (cu_seqlens); or with
            their masks, (batch, sequence), False for padding.
        blocks: for sparse attention, the arguments that say which blocks of keys each block of queries attends to:
            lists, (batch, heads, blocks of queries, longest list), and their lengths; or one map, (batch, heads, blocks
            of queries, blocks of keys).
    """

    backward: str = ""
    offsets: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOp(Row):
    """One dispatcher op that runs an attention forward and returns its output and statistics.

    Args:
        backend: its name in reports, such as "fa2".
        namespace, name: of the op, see Row.
        layout: of the key tensor, a key of KEYS_DIMENSION.
        key: the argument that holds the key tensor.
        max_kv: the argument that holds the number of keys, for packed layouts. If it is None in a call, the key
            tensor says the number.
        dropout: the argument that makes the kernel draw random numbers; None for never, "always" if unknown.
        selection: for sparse attention, the arguments that hold the chosen blocks; they are saved with the outputs.
        coarse: for sparse attention, the argument with one entry per block of keys. The attention over that few keys
            that chooses the blocks is small ops, and may be recomputed.
        with_argument: an argument that only this op has, if two libraries have an op of this namespace and name.
        trains: False refuses the op, with `note` as the reason.
        flops: only for FLOP counting.

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
    """An autograd.Function whose forward is an attention without a dispatcher op; made visible once it is loaded.

    Args:
        module: regular expression for the whole name of the module that has it in its __dict__.
        name: the name of the class in that module.
        backend, key, layout, max_kv, dropout, flops: as in AttentionOp, for the arguments of its forward.
    """

    backend: str
    module: str
    name: str
    key: str = "k"
    layout: str = "bshd"
    max_kv: str | None = None
    dropout: str | None = ALWAYS
    flops: Flops = Flops()


_NO_ATTENTION = AttentionOp(backend="", namespace="", name="", dropout=None)
"""Stands for a row that is not an attention: BoundOp reads nothing of its calls."""


def number_of_keys(row: AttentionOp | OpaqueFunction, max_kv: Any, key: torch.Tensor, name: str) -> int:
    """Number of keys each query of a call may attend to (a SymInt under a trace with dynamic shapes).

    Args:
        max_kv: the value of that argument in the call; None if the row or the call has none.
        key: the key tensor.
        name: the name of the op or function, for the message.

    Raises:
        FastacError: the key tensor does not have the row's layout.
    """
    # Reading a tensor would wait for the device. Some libraries pass -1 where nothing is packed.
    if max_kv is not None and not isinstance(max_kv, torch.Tensor):
        # A SymInt has __index__, too. It is not converted: that would fix the number in a trace with dynamic shapes.
        if not hasattr(max_kv, "__index__"):
            raise FastacError(
                f"{name}: its row says that {row.max_kv!r} is the number of keys, and it was called with {max_kv!r}. "
                f"Name the argument that holds the length of the longest sequence (max_kv=...), or none."
            )
        if max_kv >= 0:
            return max_kv  # type: ignore[no-any-return]
    try:
        return key.shape[KEYS_DIMENSION[row.layout]]
    except (AttributeError, IndexError, RuntimeError):
        is_strided = isinstance(key, torch.Tensor) and not key.is_nested
        seen = f"the shape {tuple(key.shape)}" if is_strided else f"a {type(key).__name__}: {key!r:.80}"
        if getattr(key, "is_nested", False):
            seen = "a strided nested tensor, which has no shape (layout=torch.jagged has one)"
        raise FastacError(
            f"{name}: its row says that the layout of {row.key or 'its second tensor'!r} is {row.layout!r}, and it was "
            f"called with {seen}. Name the argument that holds the keys (key=...) and its layout."
        ) from None


def may_draw(dropout: Any) -> bool:
    """Whether a kernel may draw random numbers, by the value of its `dropout` argument. A tensor is not read."""
    # Reading a tensor would wait for the device.
    return isinstance(dropout, torch.Tensor) or bool(dropout)


class BoundOp:
    """A row bound to one op of this process: reads calls by argument position.

    Raises FastacError when the op cannot be saved: it always writes an argument, returns no tensor, or lacks an
    argument that the row names.
    """

    number = 0
    """Its place among the intercepted ops, from 1 on; 0 for an op that is not intercepted."""

    def __init__(self, op: Op, row: Row) -> None:
        self.op = op
        self.redispatch = torch_private.redispatch_of(op)
        self.row = row
        self.kind = row.kind
        self.name = str(op)
        self.qualified_name = qualified_name(op)
        self.is_attention = isinstance(row, AttentionOp)
        self.is_opaque = row.namespace == OPAQUE_NAMESPACE
        self.is_higher_order = isinstance(op, torch_private.HigherOrderOperator)
        self._attention = row if isinstance(row, AttentionOp) else _NO_ATTENTION
        self.backend = self._attention.backend
        self.trains = self._attention.trains
        # False: no call of it draws, and nobody reads a generator for it, which costs time in every call.
        self.may_draw = self._attention.dropout is not None
        self.selects = bool(self._attention.selection)
        arguments = torch_private.arguments_of(op)
        self._positions = {argument.name: i for i, argument in enumerate(arguments)}
        self._defaults = {argument.name: argument.default for argument in arguments}
        # Rows of other kinds have no key, and the arguments of an op that does not train are not checked.
        self._key = self._positions.get(self._attention.key, 0)
        self.written = [argument.name for argument in arguments if argument.written]
        self.differentiates = self.is_higher_order or torch_private.handles(self.qualified_name, "Autograd")
        # An op that does not train may write, too, as SageAttention's ops do. It is refused when it is called, with
        # `note`, which is the better reason. Outputs of the two kinds are never saved.
        if self.trains and row.kind not in ("decomposition", "other"):
            self._check_schema({argument.name: argument.type for argument in arguments})

    def __repr__(self) -> str:
        return f"BoundOp({self.name}, {self.kind})"

    def _check_schema(self, types: Mapping[str, str]) -> None:
        where = f"register: {self.name}"
        for name in torch_private.always_written(self.op):
            raise FastacError(
                f"{where} writes its argument {name!r}. On replay the kernel does not run and the write would be "
                f"missing, with wrong gradients. Register, and call, a functional op."
            )
        if not torch_private.returns_tensors(self.op):
            raise FastacError(f"{where} returns no tensor, so there is nothing to save")
        if not self.is_attention:
            return
        others = [self._attention.coarse, *self._attention.selection]
        check_named(self._attention, self._positions, where, others)
        for role, name in [("keys", self._attention.key), *(("blocks", other) for other in filter(None, others))]:
            # A higher-order op has no schema, and so no types.
            if types[name] not in ("", "Tensor", "Optional[Tensor]"):
                raise FastacError(
                    f"{where}: its row says that {name!r} holds the {role}, and its type is {types[name]}. Name the "
                    f"tensor that holds them (key=..., selection=..., coarse=...)."
                )
        if not torch_private.is_of_torch(self.op) and (only := torch_private.only_kernel(self.qualified_name)):
            raise FastacError(
                f"{where} has no kernel for a device, only one for {only}, which runs before a call arrives where "
                f"fastac intercepts it.\nRegister the op that this kernel calls instead; or give the op a kernel for "
                f"its device, and torch.library.register_autograd."
            )

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of an argument in a call, passed by position or by name."""
        # The dispatcher hands over what the caller wrote: defaults are not filled in.
        position = self._positions[name]
        return args[position] if position < len(args) else kwargs.get(name, self._defaults[name])

    def keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of keys of an attention call; if it is decomposed, the last dimension of its softmax; otherwise 0."""
        if not self.is_attention:
            return args[0].shape[-1] if self.kind == "decomposition" else 0
        row = self._attention
        max_kv = None if row.max_kv is None else self.argument(row.max_kv, args, kwargs)
        key = args[self._key] if self._key < len(args) else self.argument(row.key, args, kwargs)
        return number_of_keys(row, max_kv, key, self.name)

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the kernel may draw random numbers in this call."""
        dropout = self._attention.dropout
        return dropout == ALWAYS or (dropout is not None and may_draw(self.argument(dropout, args, kwargs)))

    def selection(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
        """The tensors of a call that hold the blocks it attends to."""
        return [self.argument(name, args, kwargs) for name in self._attention.selection]

    def coarse_keys(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of keys of the coarse attention that chose this call's blocks; 0 for a kernel that is not sparse."""
        coarse = self._attention.coarse
        blocks = self.argument(coarse, args, kwargs) if coarse else None
        return 0 if blocks is None else int(blocks.numel())

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise FastacError when this call, whose output is saved, passes a tensor that the kernel writes."""
        for name in self.written:
            if self.argument(name, args, kwargs) is not None:
                raise FastacError(
                    f"{self.name} was called with {name!r}, which it writes. A saved call does not run again, so the "
                    f'write would be missing in recompute. Call it without {name!r}, or use policy="full".'
                )

    def check_differentiates(self) -> None:
        """Raise FastacError when the op has no autograd kernel, so that autograd differentiates its inner ops."""
        # It is asked again, since an autograd kernel may be registered after the row.
        self.differentiates = torch_private.handles(self.qualified_name, "Autograd")
        if not self.differentiates:
            raise FastacError(
                f"{self.name} cannot be saved: it has no autograd kernel, and an input requires grad. A saved call "
                f"does not run again, and the graph that autograd makes inside it would be missing.\nGive it a "
                f'backward: torch.library.register_autograd("{name_of(self.op)}", ...).'
            )

    def check_trains(self) -> None:
        """Raise UnsupportedBackendError when the row says that the op has no backward."""
        if not self.trains:
            raise UnsupportedBackendError(
                f"{self.name} does not train: {self._attention.note or 'its row says so'}. Use another attention "
                f"backend; `fastac backends` lists them."
            )


class _Rows:
    """The rows and decisions of this process."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.lock = threading.RLock()
        # How often the rows have changed.
        self.changes = 0
        self.reset()

    def reset(self) -> None:
        """Forget decisions: ops are classified anew."""
        self.changes += 1
        # Also "no row" is remembered: an op that was unknown when it was first called may have a row by now.
        self.decisions: dict[object, BoundOp | None] = {}
        # Errors already logged.
        self.reported: set[str] = set()


state = _Rows()


def rows() -> tuple[Row, ...]:
    """Every registered row, in the order of registration."""
    return tuple(state.rows)


def register(*new_rows: Row, replace: bool = False) -> None:
    """Add rows. Ops that are loaded are checked at once, others when they are first called.

    Args:
        new_rows: such as `AttentionOp(...)`. All of them are added, or none. A row that is registered already stays.
        replace: another row for the same namespace and name is replaced; otherwise it is an error.

    Raises:
        FastacError: a row is malformed, its op has another row, or its op cannot be saved. Nothing is registered then.

    Example:
        >>> fastac.register(fastac.AttentionOp(backend="mine", namespace="my_kernels", name="attention_forward"))
    """
    with state.lock:
        rows_before = list(state.rows)
        try:
            for row in new_rows:
                if not isinstance(row, Row):
                    raise FastacError(f"register: expected a fastac.AttentionOp, got {type(row).__name__}: {row!r}")
                check_row(row)
                others = [other for other in state.rows if _identity(row) == _identity(other)]
                if others and row not in others and not replace:
                    options = vars(others[0]).items()
                    differences = [f"{name}={value!r}" for name, value in options if value != vars(row).get(name)]
                    raise FastacError(
                        f"register: there is another row for {row.namespace}::{row.name}, with "
                        f"{', '.join(differences)}. To replace it: fastac.register(..., replace=True)."
                    )
                # A notebook's cell that is run again registers an equal row: it keeps its place.
                if row not in others:
                    state.rows[:] = [*(other for other in state.rows if other not in others), row]
            state.reset()
            present_ops(strictly=new_rows)
        except BaseException:
            # Ctrl-C must not leave half of the rows, either.
            state.rows[:] = rows_before
            state.reset()
            raise


def check_row(row: Row | OpaqueFunction, call: str = "register") -> None:
    """Raise FastacError when a row is malformed. call: the public function that it was given to."""
    where = f"{call}: {row.name!r}"
    for field in dataclasses.fields(row):
        value, declared = getattr(row, field.name), str(field.type)
        # A string in the place of a tuple would be taken for its letters.
        # Annotations are strings in this module: the first letter of one tells its type.
        expected: type = {"s": str, "t": tuple, "b": bool, "F": Flops}[declared[0]]
        if not isinstance(value, expected) and (value is not None or declared != "str | None"):
            raise FastacError(f"{where}: {field.name} is {value!r}, expected {declared}")
    pattern = row.namespace if isinstance(row, Row) else row.module
    try:
        re.compile(pattern)
    except re.error as error:
        raise FastacError(f"{where}: {pattern!r} is not a regular expression: {error}") from error
    if not pattern or "::" in pattern:
        raise FastacError(f"{where}: there is no namespace or module {pattern!r}: write it without '::'")
    if isinstance(row, Row) and (row.kind not in KINDS or (row.kind == KINDS[0]) != isinstance(row, AttentionOp)):
        raise FastacError(f"{where}: kind {row.kind!r} is not one of {', '.join(KINDS)}; the first is for AttentionOp")
    if not row.name.isidentifier():
        raise FastacError(f"{where} is not the bare name of an op, without namespace and overload")
    if (layout := getattr(row, "layout", "thd")) not in KEYS_DIMENSION:
        raise FastacError(f"{where}: layout {layout!r} is not one of {', '.join(KEYS_DIMENSION)}")
    if len(offsets := getattr(row, "flops", Flops()).offsets) not in (0, 2):
        raise FastacError(f"{where}: offsets are two arguments, of queries and of keys: got {offsets!r}")
    if isinstance(row, AttentionOp) and len(row.flops.blocks) > 1 and not row.coarse:
        raise FastacError(f"{where}: it names lists of blocks, and no `coarse` that says how many exist")


def check_named(
    row: AttentionOp | OpaqueFunction, arguments: Collection[str], where: str, others: Iterable[str] = ()
) -> None:
    """Raise FastacError for an argument that a row names and its op, or forward, does not have.

    others: further arguments that the row names.
    """
    dropout = None if row.dropout == ALWAYS else row.dropout
    for name in filter(None, (row.key, row.max_kv, dropout, *row.flops.offsets, *row.flops.blocks, *others)):
        if name not in arguments:
            raise FastacError(
                f"{where} has no argument {name!r}, which its row names. Its arguments are {', '.join(arguments)}: "
                f"name one of these, as in key=..."
            )


def _identity(row: Row) -> tuple[str, str, str]:
    return row.namespace, row.name, getattr(row, "with_argument", "")


def _row_of(op: Op) -> Row | None:
    namespace, _, name = name_of(op).partition("::")
    named = [row for row in state.rows if row.names(namespace, name)]
    if not named:
        return None
    arguments = torch_private.arguments_of(op)
    names = ["", *(argument.name for argument in arguments)]
    # For a month, flash-attn 2 and 3 had ops of the same namespace and name. An argument tells them apart.
    rows_of_op = [row for row in named if getattr(row, "with_argument", "") in names]
    if len(rows_of_op) > 1:
        raise FastacError(
            f"register: {namespace}::{name} is claimed by {len(rows_of_op)} rows: "
            + "; ".join(f"{row.namespace}::{row.name} of {getattr(row, 'backend', 'fastac')}" for row in rows_of_op)
        )
    # A choice with `out` writes memory of the caller: a replay would not.
    if not rows_of_op or (rows_of_op[0].kind == "choice" and any(argument.written for argument in arguments)):
        return None
    return rows_of_op[0]


def classify(op: Any) -> BoundOp | None:
    """The row of an op, bound to it; None for an op without a row. Looked up in a dict after the first time.

    op: an OpOverload or a HigherOrderOperator; anything else has no row.
    """
    try:
        return state.decisions[op]
    except KeyError:
        pass
    row = _row_of(op) if isinstance(op, Op) else None
    decision = state.decisions[op] = None if row is None else BoundOp(op, row)
    return decision


def is_other(namespace: str, name: str) -> bool:
    """Whether a row says that an op, or an autograd.Function of a module, is not an attention."""
    return any(row.kind == "other" and row.names(namespace, name) for row in state.rows)


def find_op(qualified: str) -> Op | None:
    """The op of a qualified name; None if a library has registered an implementation and not yet defined the op."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    try:
        op = getattr(getattr(torch.ops, namespace), name)
        return op if namespace == "higher_order" else getattr(op, overload or "default")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def present_ops(strictly: Collection[Row] = ()) -> list[BoundOp]:
    """Every op of this process that a row names, all overloads.

    An op that cannot be saved is left out and logged. It raises FastacError if its row is among `strictly`.
    """
    # The dispatcher lists some thousand ops. A set of names rules out nearly all of them before a pattern is tried.
    names = {row.name for row in state.rows}
    present = []
    for qualified in [*torch_private.op_names(), *(f"higher_order::{name}" for name in names)]:
        namespace, _, rest = qualified.partition("::")
        name = rest.partition(".")[0]
        if name not in names:
            continue
        op = find_op(qualified)
        try:
            bound = classify(op)
        except FastacError as error:
            # An `out` overload cannot be saved, which is no loss: models call the functional one.
            if op is not None and torch_private.has_functional_overload(op) and torch_private.always_written(op):
                continue
            if any(row.names(namespace, name) for row in strictly):
                raise
            # Ops are looked for again whenever a library was loaded: log an error once.
            if str(error) not in state.reported:
                state.reported.add(str(error))
                logger.error("%s (left out: a region that calls the op raises)", error)
            continue
        if bound is not None:
            present.append(bound)
    return present
