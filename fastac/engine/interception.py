"""Intercepts ops with a row at the BackendSelect dispatch key, and hands their calls to the open scope.

BackendSelect is in the keyset of every call through the dispatcher: below autograd, autocast and dispatch modes, above
the kernels of every device. Attention ops leave it empty. A Python function there sees the call on any device without
replacing a kernel, and redispatches it with the GIL released. It is never removed: that crashes other threads inside a
call. With no region open it costs a few microseconds per call.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from fastac import registry
from fastac.engine import sparse, torch_private
from fastac.engine.process import process, thread
from fastac.engine.tape import run_kernel
from fastac.errors import FastacError
from fastac.registry import BoundOp, Row

logger = logging.getLogger("fastac")

LINEAR_OPS = ("aten::addmm", "aten::mm", "aten::bmm")
"""Ops that a Linear module ends in (torch 2.13). With a bias it is addmm, unless the input cannot be flattened. If the
weight is frozen, an input that cannot be flattened is multiplied sample by sample, by bmm."""

# A Library takes its registrations back when it is collected. Another thread may be inside a call then, and torch fails
# with an internal assert (fallthrough_kernel was executed). So they live as long as the process.
_libraries: list[torch.library.Library] = []


def install() -> list[BoundOp]:
    """Intercept the ops that have a row, each once in this process. Returns all present ops with a row.

    Raises FastacError if another package stands at BackendSelect of such an op: the later one would shadow the earlier.
    """
    with process.lock:
        present = registry.present_ops()
        for op in present:
            # A row may say "other" now: the function at BackendSelect stays, and passes calls on.
            if op.kind != "other":
                _intercept(op)
            if op.qualified_name in process.installed:
                op.number = process.installed[op.qualified_name].number
                # The op may have been defined again since, with other arguments, or its row replaced.
                process.installed[op.qualified_name] = op
        process.modules = loaded_modules()
        return present


def install_linear() -> None:
    """Intercept the matmuls that Linear modules end in, once. From then on each costs a few microseconds."""
    with process.lock:
        for name in LINEAR_OPS:
            if name not in process.installed:
                op = getattr(torch.ops.aten, name.removeprefix("aten::")).default
                _intercept(BoundOp(op, Row(namespace="aten", name=name.removeprefix("aten::"), kind="linear")))


def loaded_modules() -> tuple[int, int, int, str]:
    """A value that changes with the rows, and when a module or a library of ops is loaded."""
    # Cheap, because every region asks. The newest module is in it for a module that replaces another one.
    counts = registry.state.changes, len(sys.modules), len(torch.ops.loaded_libraries)
    try:
        return *counts, next(reversed(sys.modules))
    except RuntimeError:  # another thread is importing at this moment
        return *counts, ""


def _intercept(first: BoundOp) -> None:
    name = first.qualified_name
    if name in process.installed:
        return
    # The dispatcher does not chain functions at one key: the later one would shadow the earlier.
    if torch_private.has_kernel(name, "BackendSelect"):
        raise FastacError(
            f"{name} cannot be saved: another package has registered a function at its BackendSelect dispatch key, "
            f'which fastac needs. Load fastac without that package, or use policy="full".'
        )

    def called(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        op = process.installed.get(name, first)
        scope = thread.scope
        if scope is not None and op.kind != "other":
            return scope.call(op, keyset, args, kwargs)
        if op.kind == "choice" and sparse.is_choice(args):
            thread.choices.add(op.row.name)
        elif process.listeners and op.kind in ("attention", "decomposition"):
            for listener in tuple(process.listeners):  # a copy: a listener may remove itself
                listener(op, args, kwargs)
        return run_kernel(op, keyset, args, kwargs)

    # Before the registration, since calls of other threads arrive right after it. Tapes that are open ignore them by
    # this number: their forward has no entry for them.
    first.number = len(process.installed) + 1
    if first.is_higher_order:
        torch_private.at_backend_select(first.op, called)
    else:
        namespace, _, rest = name.partition("::")
        _libraries.append(torch.library.Library(namespace, "IMPL"))
        _libraries[-1].impl(rest, called, "BackendSelect", with_keyset=True)
    process.installed[name] = first
    logger.debug("intercepting %s", name)
