"""Watches a region's forward: for attention calls that no row covers, and for libraries that load meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import census, interception, opaque, registry
from fastac.autograd_graph import graph_roots, leads_to, tensors_of
from fastac.collectives import is_called_by_fsdp, writes_its_buffer
from fastac.compile.torch_private import CompiledCalls
from fastac.dispatcher_internals import is_composite
from fastac.entries import CountedOps
from fastac.policy import Policy
from fastac.preservation import autocast_as_called
from fastac.recognition import (
    Decomposed,
    SoftmaxAttention,
    UnknownOp,
    looks_like_attention_forward,
    without_coarse,
)
from fastac.registry import ResolvedOp


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
        self.silent: list[str] = []
        self.joined: list[str] = []
        self.writing: list[str] = []  # collectives that write a buffer, but for FSDP's own
        self.communicates = False
        self.progress: Callable[[], int] = lambda: 0
        self.let_in: Callable[[ResolvedOp], None] = lambda _: None
        self.ops: tuple[ResolvedOp, ...] = ()  # what the tape records is not seen twice
        module = census.module_of(function)
        parameters = list(module.parameters()) if module is not None else []
        tensors = list(tensors_of(inputs))
        self._softmax_attention = SoftmaxAttention(tensors)
        self._roots = graph_roots([*parameters, *tensors])
        self._coarse: list[int] = []
        self._thread = 0
        self._modules = interception.loaded_modules()
        self._ops = CountedOps()
        self._without_row: set[Any] = set()
        self._module = module
        self._handles: list[Any] = []
        self.compiled_calls = CompiledCalls()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Observer:
        self._thread = threading.get_ident()
        if self._module is not None:
            for use in registry.backend_uses(self._module):
                self._watch(use.module, self._module.get_submodule(use.module))
        interception.watchers.append(self._outside)
        self.compiled_calls.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        interception.watchers.remove(self._outside)
        self.compiled_calls.__exit__(*exception)
        while self._handles:
            self._handles.pop().remove()
        self.progress, self.let_in = lambda: 0, lambda _: None  # they held the record, which holds this
        counting = without_coarse([found for _, found in self.missed], self._coarse)
        self.missed = [missed for missed in self.missed if missed[1] in counting]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._join_late(func)
        with autocast_as_called(func):
            outputs = func(*args, **(kwargs or {}))
        self.observe(func, args, outputs, kwargs or {})
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
        recognized = len(self.missed) + len(self.unknown) + len(self.elsewhere)
        return self.progress() + recognized + self._softmax_attention.products

    def _join_late(self, op: Any) -> None:
        """Let an op whose library was loaded by this very forward count in it, before it is called for the first time.

        Not a Function that is made visible meanwhile, nor an op that got its row meanwhile: they may have been called
        already, and count from the next region.
        """
        if (modules := interception.loaded_modules()) != self._modules:
            self._modules = modules
            self.joined += opaque.make_known_visible()
        resolved = registry.classify(op)
        if resolved is None:
            self._without_row.add(op)
            return
        if resolved.qualified_name not in interception.intercepted():
            interception.install()
            self.joined.append(resolved.name)
        if resolved not in self._ops and op not in self._without_row and not opaque.is_opaque(resolved):
            self.let_in(resolved)

    def observe(self, op: Any, args: Any, outputs: Any, kwargs: Any) -> None:
        """Take note of one op that has just run."""
        resolved = registry.classify(op)
        if resolved is not None:
            self.communicates |= resolved.is_collective
            if resolved.is_attention:
                self._coarse.append(resolved.coarse_keys(args, kwargs))
            return
        if not isinstance(op, torch._ops.OpOverload):
            if looks_like_attention_forward(op.name(), args):
                self.unknown.append(UnknownOp("higher_order", op.name()))
            return
        if writes_its_buffer(op):
            self.communicates = True
            if not is_called_by_fsdp():
                self.writing.append(str(op).removesuffix(".default"))
            return
        found = self._softmax_attention.follow(op, args, outputs)
        if found is not None and self.policy.saves(found.keys):
            self.missed.append((self.where(), found))
        elif looks_like_attention_forward(op._schema.name, args) and not is_composite(op._schema.name):
            self.unknown.append(UnknownOp(*op._schema.name.split("::")))

    def _outside(self, resolved: ResolvedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (
            threading.get_ident() != self._thread
            and leads_to(args, self._roots)
            and self.policy.saves(resolved.keys(args, kwargs))
        ):
            self.elsewhere.append(
                f"{resolved.name} was called in another thread, where no region is open. Call it in the block's own "
                f"thread."
            )
