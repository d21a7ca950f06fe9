"""Lets registered ops pass by the open scope, at the BackendSelect dispatch key.

BackendSelect is in the keyset of every call through the dispatcher, below autograd, autocast and dispatch modes, and
above every device's kernel; attention ops leave it empty. A Python function there sees the attention call on any
device without replacing a kernel, and passes it on with the GIL released. It is never taken off again: that crashes
other threads that are inside a call. With no region open it costs a few microseconds per attention call.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from fastac import dispatcher_internals, flops, registry
from fastac.dispatcher_internals import BELOW_BACKEND_SELECT
from fastac.entries import generation
from fastac.errors import FastacError
from fastac.registry import ResolvedOp
from fastac.rows import AttentionOp, CollectiveOp, DecompositionOp, LinearOp, SelectionOp
from fastac.scopes import run_kernel, thread

logger = logging.getLogger("fastac")

Watcher = Callable[[ResolvedOp, tuple[Any, ...], dict[str, Any]], None]

watchers: list[Watcher] = []
"""Told of attention calls in threads without an open region; a census that is open in another thread listens."""

before_installation: list[Callable[[], object]] = []
"""Called by `install` before it looks for ops: what was loaded since may have to be given an op first."""


class _Holder:
    """What stands at BackendSelect of one op for good, and the op it is now."""

    library: torch.library.Library | None = None

    def __init__(self, resolved: ResolvedOp) -> None:
        self.resolved = resolved


LINEAR_OPS = ("aten::addmm", "aten::mm", "aten::bmm")
"""What a Linear module ends in (torch 2.13): with a bias in one op, but for inputs that can not be flattened. Those are
multiplied sample by sample where the weight is frozen."""

_holders: dict[str, _Holder] = {}
_installing = threading.Lock()
_known_op_names = 0
_known_modules: object = None


def intercepted() -> Collection[str]:
    """Qualified names of the ops that pass by the open scope."""
    return _holders.keys()


def install() -> list[str]:
    """Intercept every registered op that the process has, once, and have torch count its FLOPs.

    Cheap when no library was loaded since.

    Returns the names of those that are new.
    Raises FastacError when somebody else stands at BackendSelect of such an op: the later would shadow the earlier.
    """
    global _known_op_names
    for listener in before_installation:
        listener()
    with _installing:
        if install not in registry.after_registration:
            registry.after_registration.append(install)
        count = len(dispatcher_internals.op_names()) + len(registry.rows())
        if count == _known_op_names and not any(_was_defined_again(holder.resolved) for holder in _holders.values()):
            return []
        made = []
        for resolved in registry.present_ops():
            holder = _holders.get(resolved.qualified_name)
            if holder is None:
                _intercept(resolved)
                made.append(resolved.name)
            elif holder.resolved is not resolved and holder.resolved.op is not resolved.op:
                holder.resolved = resolved
        flops.register_formulas()
        _known_op_names = count
        return made


def _was_defined_again(resolved: ResolvedOp) -> bool:
    """Whether a notebook cell, say, defined an op anew under a name that is intercepted: its arguments may differ."""
    found = registry.find_op(resolved.qualified_name)
    return found is not None and found is not resolved.op


def install_linear() -> None:
    """Intercept the products that Linear modules end in, once. From then on each costs a few microseconds."""
    with _installing:
        for name in LINEAR_OPS:
            op = registry.find_op(name)
            if op is not None and name not in _holders:
                namespace, _, rest = name.partition("::")
                _intercept(ResolvedOp(op, LinearOp(namespace=namespace, name=rest)))


def install_if_loaded() -> None:
    """Intercept what modules that were imported since bring along. Costs nothing when none was."""
    global _known_modules
    if (modules := loaded_modules()) != _known_modules:
        _known_modules = modules
        install()


def loaded_modules() -> tuple[int, int, str]:
    """What changes when a module or a library of ops is loaded: how many there are, and the newest."""
    counts = len(sys.modules), len(torch.ops.loaded_libraries)
    try:
        return *counts, next(reversed(sys.modules))
    except RuntimeError:  # another thread is importing at this moment
        return *counts, ""


def _intercept(resolved: ResolvedOp) -> None:
    name = resolved.qualified_name
    if dispatcher_internals.has_kernel(name, "BackendSelect"):
        raise FastacError(
            f"{name} can not be saved: another package has registered a function at its BackendSelect dispatch key, "
            f'where fastac must stand. Load fastac without that package, or use policy="full".'
        )
    holder = _Holder(resolved)
    functions = {
        AttentionOp: _attention,
        DecompositionOp: _decomposition,
        SelectionOp: _other,
        CollectiveOp: _other,
        LinearOp: _product,
    }
    function = functions[type(resolved.row)](holder)
    if isinstance(resolved.op, torch._ops.HigherOrderOperator):
        dispatcher_internals.at_backend_select(resolved.op, function)
    else:
        namespace, _, rest = name.partition("::")
        holder.library = torch.library.Library(namespace, "IMPL")
        holder.library.impl(rest, function, "BackendSelect", with_keyset=True)
    _holders[name] = holder
    generation.add(name)
    logger.debug("intercepting %s", name)


def _tell_watchers(resolved: ResolvedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for watcher in tuple(watchers):  # one that leaves meanwhile, in another thread, must not hide the next
        watcher(resolved, args, kwargs)


def _attention(holder: _Holder) -> Callable[..., Any]:
    def attention_called(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = thread.scope
        resolved = holder.resolved
        if scope is not None:
            return scope.call(resolved, keyset, args, kwargs)
        _tell_watchers(resolved, args, kwargs)
        return run_kernel(resolved, keyset, args, kwargs)

    return attention_called


def _decomposition(holder: _Holder) -> Callable[..., Any]:
    def attention_decomposed(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = thread.scope
        resolved = holder.resolved
        if scope is not None:
            scope.decomposed(resolved, args, kwargs)
        else:
            _tell_watchers(resolved, args, kwargs)
        return resolved.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)

    return attention_decomposed


def _other(holder: _Holder) -> Callable[..., Any]:
    """For what is no attention: choices and collectives."""

    def called(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = thread.scope
        resolved = holder.resolved
        if scope is not None:
            return scope.receive(resolved, keyset, args, kwargs)
        return resolved.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)

    return called


def _product(holder: _Holder) -> Callable[..., Any]:
    def product_called(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = thread.scope
        if scope is not None and scope.linear is not None:
            return scope.product(holder.resolved, keyset, args, kwargs)
        return holder.resolved.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)

    return product_called
