"""Lets ops with a row pass by the open scope, at the BackendSelect dispatch key.

BackendSelect is in the keyset of every call through the dispatcher, below autograd, autocast and dispatch modes, and
above every device's kernel; attention ops leave it empty. A Python function there sees the call on any device without
replacing a kernel, and passes it on with the GIL released. It is never taken off again: that crashes other threads that
are inside a call. With no region open it costs a few microseconds per call.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from fastac import registry
from fastac.engine import flops, torch_private
from fastac.engine.tape import engine, run_kernel, thread
from fastac.errors import FastacError
from fastac.registry import BoundOp, Row

logger = logging.getLogger("fastac")

LINEAR_OPS = ("aten::addmm", "aten::mm", "aten::bmm")
"""What a Linear module ends in (torch 2.13): with a bias in one op, but for inputs that cannot be flattened. Those are
multiplied sample by sample where the weight is frozen."""


def install() -> None:
    """Intercept every op with a row that the process has, once, and have torch count its FLOPs.

    Raises FastacError when somebody else stands at BackendSelect of such an op: the later would shadow the earlier.
    """
    with engine.lock:
        for op in registry.present_ops():
            if op.qualified_name not in engine.installed:
                _intercept(op)
            first, library = engine.installed[op.qualified_name]
            op.number = first.number
            engine.installed[op.qualified_name] = op, library  # it may have been defined anew, with other arguments
        flops.register_formulas()
        engine.modules = loaded_modules()


def install_linear() -> None:
    """Intercept the products that Linear modules end in, once. From then on each costs a few microseconds."""
    with engine.lock:
        for name in LINEAR_OPS:
            op = registry.find_op(name)
            if op is not None and name not in engine.installed:
                namespace, _, rest = name.partition("::")
                _intercept(BoundOp(op, Row(namespace=namespace, name=rest, kind="linear")))


def loaded_modules() -> tuple[int, int, int, str]:
    """What changes when a row, a module or a library of ops comes in: how many there are, and the newest."""
    counts = len(registry.state.rows), len(sys.modules), len(torch.ops.loaded_libraries)
    try:
        return *counts, next(reversed(sys.modules))
    except RuntimeError:  # another thread is importing at this moment
        return *counts, ""


def _intercept(first: BoundOp) -> None:
    name = first.qualified_name
    if torch_private.has_kernel(name, "BackendSelect"):
        raise FastacError(
            f"{name} cannot be saved: another package has registered a function at its BackendSelect dispatch key, "
            f'where fastac must stand. Load fastac without that package, or use policy="full".'
        )

    def called(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        op, _ = engine.installed.get(name, (first, None))
        scope = thread.scope
        if scope is not None:
            return scope.call(op, keyset, args, kwargs)
        if engine.listeners and op.kind in ("attention", "decomposition"):
            for listener in tuple(engine.listeners):  # one that leaves meanwhile must not hide the next
                listener(op, args, kwargs)
        return run_kernel(op, keyset, args, kwargs)

    first.number = len(engine.installed) + 1  # before other threads' calls arrive here: their tapes know none of it
    library = None
    if first.is_higher_order:
        torch_private.at_backend_select(first.op, called)
    else:
        namespace, _, rest = name.partition("::")
        library = torch.library.Library(namespace, "IMPL")
        library.impl(rest, called, "BackendSelect", with_keyset=True)
    engine.installed[name] = first, library
    logger.debug("intercepting %s", name)
