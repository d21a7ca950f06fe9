"""Which attention calls a region has, and whether every one that the policy saves was saved.

The first call of a block class with given input shapes is watched (`Observer`); later calls only compare the ops they
recorded with what was found then. What is known about a block is kept here, weakly, never on the block itself.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import interception, registry, torch_internals
from fastac.policy import Policy
from fastac.registry import ResolvedOp
from fastac.tape import Decomposed, Record

logger = logging.getLogger("fastac")


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call of a region. saved_bytes: memory its kept outputs hold, 0 when it is recomputed."""

    op: str
    keys: int
    saved: bool
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class Census:
    """The attention calls of one region, in order. ops: what a later region of this kind must record."""

    ops: list[ResolvedOp]
    calls: tuple[Call, ...]

    @classmethod
    def of_tape(cls, record: Record) -> Census:
        """From a region that has just been recorded on a tape."""
        calls = [
            Call(entry.resolved.name, int(entry.keys), entry.kept is not None, entry.saved_bytes)
            for entry in record.tape
            if entry is not None
        ]
        return cls(list(record.calls), tuple(calls))


@dataclasses.dataclass
class BlockRecord:
    """What is known about one block. censuses: of its regions, by policy and input signature; latest: the last one."""

    name: str = ""
    latest: Census | None = None
    censuses: dict[Any, Census] = dataclasses.field(default_factory=dict)


listeners: list[Callable[[Census], None]] = []
"""Told of the census of every region that ends as it should, while they stand here (fastac.verify)."""

_blocks: weakref.WeakKeyDictionary[Any, BlockRecord] = weakref.WeakKeyDictionary()
_kinds: weakref.WeakKeyDictionary[Any, dict[Any, Census]] = weakref.WeakKeyDictionary()


def block_record(function: object) -> BlockRecord | None:
    """What is known about a block; None for a plain function, of which nothing is kept."""
    block = getattr(function, "__self__", function)
    if not isinstance(block, torch.nn.Module):
        return None
    record = _blocks.get(block)
    if record is None:
        record = _blocks[block] = BlockRecord()
    return record


def known(function: Any) -> dict[Any, Census]:
    """Censuses by policy and input signature, of the class of a block or the code of a function."""
    kind = _kind(function)
    censuses = _kinds.get(kind)
    if censuses is None:
        censuses = _kinds[kind] = {}
    return censuses


def _kind(function: Any) -> Any:
    while True:
        if isinstance(function, torch.nn.Module):
            return type(getattr(function, "_orig_mod", function))
        if isinstance(function, types.MethodType):
            if isinstance(function.__self__, torch.nn.Module) and function.__name__ in ("__call__", "forward"):
                function = function.__self__
                continue
            return function.__func__
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # partial, decorator
        if inner is None:
            return getattr(function, "__code__", type(function))
        function = inner


def describe(function: Any) -> str:
    """A block's qualified name where fastac.enable saw it, else its class, for messages."""
    block = getattr(function, "__self__", function)
    record = _blocks.get(block) if isinstance(block, torch.nn.Module) else None
    if record is not None and record.name:
        return record.name
    return getattr(function, "__qualname__", None) or type(block).__name__


def signature(value: Any) -> Any:
    """What of a region's inputs decides which attention calls it makes: shapes, dtypes, flags, structure."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple([signature(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, signature(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)  # a number may change with every step


_LOOKS_LIKE_ATTENTION = re.compile(r"(?<![a-z])(attn|attention|sdpa|flex_attention)(?![a-z])|attn_|attention_")
_NOT_A_FORWARD = re.compile(r"backward|bwd|_grad|mask|bias")
_MATRIX_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_COPIES = ("aten::_to_copy", "aten::clone", "aten::native_dropout", "aten::_unsafe_view", "aten::expand")


def looks_like_attention_forward(name: str, args: Iterable[Any]) -> bool:
    """Whether an op without a row seems to be an attention forward: by its name, and three tensors of 3 or 4 dims."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)][:3]
    name = name.rpartition("::")[2].lower()
    return (
        len(tensors) == 3
        and all(tensor.is_floating_point() and tensor.dim() in (3, 4) for tensor in tensors)
        and _LOOKS_LIKE_ATTENTION.search(name) is not None
        and _NOT_A_FORWARD.search(name) is None
    )


class UnknownOp(NamedTuple):
    """An op that seems to be an attention forward and has no row. namespace is "" for a higher-order op."""

    namespace: str
    name: str


class SoftmaxAttention:
    """Finds attention written out as matrix product, softmax, matrix product, by following storages.

    Two activations multiplied give scores, a softmax over them gives probabilities, and their product with the values
    is one attention call that ran as small ops. A softmax that is no attention (a gate, a router) is left alone.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[StorageWeakRef, str]] = {}

    def _kind(self, tensor: torch.Tensor) -> str | None:
        found = self._kinds.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return found[1] if found else None

    def _mark(self, tensor: torch.Tensor, kind: str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._kinds[reference.cdata] = (reference, kind)

    def follow(self, op: torch._ops.OpOverload, args: Iterable[Any], outputs: Any) -> Decomposed | None:
        """Look at one op; the attention call that it completes, if any."""
        output = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(output, torch.Tensor) or not torch_internals.has_storage(output):
            return None
        name = op._schema.name
        tensors = [a for a in args if isinstance(a, torch.Tensor) and torch_internals.has_storage(a)]
        marked = [(tensor, kind) for tensor in tensors if (kind := self._kind(tensor))]
        if name in _MATRIX_PRODUCTS:
            for tensor, kind in marked:
                if kind == "probabilities":
                    return Decomposed("softmax attention written out in small ops", int(tensor.shape[-1]))
            self._mark(output, "scores")
        elif name == "aten::_softmax":
            if any(kind == "scores" for _, kind in marked):
                self._mark(output, "probabilities")
        elif marked and (name in _COPIES or torch.Tag.pointwise in op.tags):
            tensor, kind = max(marked, key=lambda pair: pair[0].numel())
            if output.numel() == tensor.numel():
                self._mark(output, kind)
        return None


class Observer(TorchDispatchMode):
    """Watches a region's forward for attention calls that no row covers. It changes nothing.

    Compiled code inside keeps running compiled, and reaches the tape by itself.
    """

    supports_higher_order_operators = True

    def __init__(self, function: Any, args: tuple[Any, ...], policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.unknown: list[UnknownOp] = []
        self.decomposed: list[Decomposed] = []
        self.elsewhere: list[str] = []
        self.late: list[str] = []
        self._softmax_attention = SoftmaxAttention()
        self._roots = _graph_roots(function, args)
        self._thread = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Observer:
        self._thread = threading.get_ident()
        interception.watchers.append(self._outside)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        interception.watchers.remove(self._outside)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.observe(func, args, outputs)
        return outputs

    def observe(self, op: Any, args: Any, outputs: Any) -> None:
        """Take note of one op that has just run."""
        resolved = registry.classify(op)
        if resolved is not None:
            if resolved.qualified_name not in interception.intercepted():
                self.late.append(resolved.name)  # its library was loaded by this very forward
            return
        if not isinstance(op, torch._ops.OpOverload):
            if looks_like_attention_forward(op.name(), args):
                self.unknown.append(UnknownOp("", op.name()))
            return
        found = self._softmax_attention.follow(op, args, outputs)
        if found is not None and self.policy.saves(found.keys):
            self.decomposed.append(found)
        elif looks_like_attention_forward(op._schema.name, args) and not torch_internals.is_composite(op._schema.name):
            self.unknown.append(UnknownOp(*op._schema.name.split("::")))

    def _outside(self, resolved: ResolvedOp, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread:
            return  # this thread is being watched; engine "sac" opens no scope of ours
        if torch.is_grad_enabled() and _leads_to(args, self._roots):
            self.elsewhere.append(resolved.name)


def _graph_roots(function: Any, args: tuple[Any, ...]) -> dict[int, object]:
    """Where the autograd graph of this region begins, by id: its inputs and the block's parameters."""
    block = getattr(function, "__self__", function)
    tensors: list[torch.Tensor] = list(block.parameters()) if isinstance(block, torch.nn.Module) else []
    tensors += [value for value in args if isinstance(value, torch.Tensor)]
    roots = [t if t.grad_fn is None else t.grad_fn for t in tensors if t.requires_grad]
    return {id(root): root for root in roots}


def _leads_to(args: Iterable[Any], roots: dict[int, object], limit: int = 2000) -> bool:
    """Whether the autograd graph behind some tensors reaches one of the roots, within so many nodes."""
    waiting: list[Any] = [a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None]
    seen: dict[int, object] = {}  # holds the nodes, or their ids would be given away again
    while waiting and len(seen) < limit:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if id(node) in roots or id(getattr(node, "variable", None)) in roots:
            return True
        waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False
