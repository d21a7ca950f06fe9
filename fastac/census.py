"""Which attention calls a region has, and whether every one that the policy saves was saved.

The first call of a block class with given input shapes is watched (`Observer`); later calls only compare the ops they
recorded with what was found then. What is known about a block is kept here, weakly, never on the block itself.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import interception, registry, torch_internals
from fastac.policy import Policy
from fastac.recognition import Decomposed, SoftmaxAttention, UnknownOp, looks_like_attention_forward
from fastac.registry import ResolvedOp
from fastac.tape import Record

logger = logging.getLogger("fastac")

MANY = 256
"""Input signatures of a block, or of a class, that are remembered; with more than that, all are learned anew."""


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
    others: list[list[ResolvedOp]] = dataclasses.field(default_factory=list)
    """What a function that is no block was found to record as well: one function may run several unlike layers."""

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

    block: weakref.ref[torch.nn.Module]
    name: str = ""
    latest: Census | None = None
    latest_key: object = None
    censuses: dict[Any, Census] = dataclasses.field(default_factory=dict)


listeners: list[Callable[[Census], None]] = []
"""Told of the census of every region that ends as it should, while they stand here (fastac.verify)."""

_blocks: dict[int, BlockRecord] = {}  # by id: a WeakKeyDictionary costs ten times as much per region
_kinds: weakref.WeakKeyDictionary[Any, dict[Any, Census]] = weakref.WeakKeyDictionary()


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


_RUNS_ITS_BLOCK = ("__call__", "_wrapped_call_impl", "forward")


def block_of(function: Any) -> torch.nn.Module | None:
    """The block that is run by a function: a module, or its forward. Another method may run any of several layers."""
    if isinstance(function, torch.nn.Module):
        return function
    return module_of(function) if getattr(function, "__name__", "") in _RUNS_ITS_BLOCK else None


def block_record(function: object) -> BlockRecord | None:
    """What is known about a block; None for any other function, of which nothing is kept."""
    block = block_of(function)
    if block is None:
        return None
    key = id(block)
    record = _blocks.get(key)
    if record is None or record.block() is not block:
        record = _blocks[key] = BlockRecord(weakref.ref(block, functools.partial(_forget, key)))
    return record


def _forget(key: int, gone: weakref.ref[torch.nn.Module]) -> None:
    record = _blocks.get(key)
    if record is not None and record.block is gone:  # else the id was given to another block already
        del _blocks[key]


def known(function: Any) -> dict[Any, Census]:
    """Censuses by policy and input signature, of the class of a block or the code of a function."""
    kind = _kind(function)
    censuses = _kinds.get(kind)
    if censuses is None:
        censuses = _kinds[kind] = {}
    return censuses


def _kind(function: Any) -> Any:
    while True:
        block = block_of(function)
        if block is not None:
            return type(getattr(block, "_orig_mod", block))
        if isinstance(function, types.MethodType):
            return function.__func__
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # partial, decorator
        if inner is None:
            return getattr(function, "__code__", type(function))
        function = inner


def describe(function: Any) -> str:
    """A block's qualified name where fastac.enable saw it, else its class, for messages."""
    block = block_of(function)
    record = block_record(function)
    if record is not None and record.name:
        return record.name
    return getattr(function, "__qualname__", None) or type(block if block is not None else function).__name__


def signature(value: Any) -> Any:
    """What of a region's inputs decides which attention calls it makes: shapes, dtypes, flags, structure."""
    if isinstance(value, (tuple, list)):
        return tuple([(v.shape, v.dtype) if isinstance(v, torch.Tensor) else signature(v) for v in value])
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple([(key, signature(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)  # a number may change with every step


class Observer(TorchDispatchMode):
    """Watches a region's forward for attention calls that no row covers. It changes nothing.

    Compiled code inside keeps running compiled, and reaches the tape by itself.
    """

    supports_higher_order_operators = True

    def __init__(self, function: Any, inputs: Any, policy: Policy, where: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.where = where
        self.unknown: list[UnknownOp] = []
        self.missed: list[tuple[str, Decomposed]] = []
        self.elsewhere: list[str] = []
        self.late: list[str] = []
        self.silent: list[str] = []
        self.progress: Callable[[], int] = lambda: 0
        self.ops: tuple[ResolvedOp, ...] = ()  # what the tape records is not seen twice
        module = module_of(function)
        parameters = list(module.parameters()) if module is not None else []
        tensors = list(tensors_of(inputs))
        self._softmax_attention = SoftmaxAttention(tensors)
        self._roots = _graph_roots([*parameters, *tensors])
        self._thread = 0
        self._module = module
        self._handles: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Observer:
        self._thread = threading.get_ident()
        interception.watchers.append(self._outside)
        if self._module is not None:
            for use in registry.backend_uses(self._module):
                self._watch(use.module, self._module.get_submodule(use.module))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        interception.watchers.remove(self._outside)
        while self._handles:
            self._handles.pop().remove()
        self.progress = lambda: 0  # it held the record, which holds this
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.observe(func, args, outputs)
        return outputs

    def _watch(self, name: str, attention: torch.nn.Module) -> None:
        """Notice an attention module that computes no attention anybody can see: a kernel past the dispatcher.

        Linear attention is seen by its matrix products.
        """
        before: list[int] = []

        def enter(_: torch.nn.Module, __: Any) -> None:
            before.append(self._seen())

        def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
            if before and before.pop() == self._seen():
                self.silent.append(name)

        self._handles += [attention.register_forward_pre_hook(enter), attention.register_forward_hook(leave)]

    def _seen(self) -> int:
        recognized = len(self.missed) + len(self.unknown) + len(self.late) + len(self.elsewhere)
        return self.progress() + recognized + self._softmax_attention.products

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
            self.missed.append((self.where(), found))
        elif looks_like_attention_forward(op._schema.name, args) and not torch_internals.is_composite(op._schema.name):
            self.unknown.append(UnknownOp(*op._schema.name.split("::")))

    def _outside(self, resolved: ResolvedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            return  # this thread is being watched; engine "sac" opens no scope of ours
        if torch.is_grad_enabled() and _leads_to(args, self._roots) and self.policy.saves(resolved.keys(args, kwargs)):
            self.elsewhere.append(resolved.name)


def tensors_of(value: Any) -> Iterable[torch.Tensor]:
    """Every tensor in nested inputs."""
    return [leaf for leaf in torch_internals.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _graph_roots(tensors: Iterable[torch.Tensor]) -> dict[int, object]:
    """Where the autograd graph of a region begins, by id: its inputs and the block's parameters."""
    roots = [t if t.grad_fn is None else t.grad_fn for t in tensors if t.requires_grad]
    return {id(root): root for root in roots}


def _leads_to(args: Iterable[Any], roots: dict[int, object], limit: int = 2000) -> bool:
    """Whether the autograd graph behind some tensors reaches one of the roots, within so many nodes."""
    if any(id(value) in roots for value in args):
        return True
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
