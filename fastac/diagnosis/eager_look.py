"""Runs compiled code once more, eagerly and observed, to see which attention calls it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastac.diagnosis.autograd_graph import nodes_between
from fastac.diagnosis.observer import Observer
from fastac.engine import torch_private
from fastac.engine.beginning import generators_preserved
from fastac.engine.blocks import module_of, modules_run_by
from fastac.engine.module_state import modules_preserved
from fastac.engine.process import thread
from fastac.engine.region import unchanged
from fastac.engine.tape import Tape, caller
from fastac.errors import rank
from fastac.registry import BoundOp


@torch_private.without_dynamo
def look(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: Tape
) -> tuple[Observer, Sequence[Any]] | None:
    """Run a region's function once more, eagerly. Generators and buffers are restored afterwards.

    first: the tape of its forward.

    Returns:
        The observer, whose tape lists the attention calls, and the autograd nodes of the region. None if ranks may
        communicate in the region.
    """
    # The region may be the first of its kind on one rank and not on others: that rank would wait for them for ever.
    modules = modules_run_by(function, args, kwargs)
    if rank() and (first.communication is not None or _may_communicate(function, modules)):
        return None
    tape = _Unkept(first.policy, callers=[])
    observer = _Watch(module_of(function), (args, kwargs), tape)
    # The tape of the region that asked must not record this run.
    outer, thread.scope = thread.scope, None
    try:
        with (
            generators_preserved(),
            modules_preserved(modules),
            # A checkpoint around the region counts what is saved: its hooks must not see what this run saves.
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unchanged),
            tape,
            observer,
            torch.compiler.set_stance("force_eager"),
        ):
            outputs = function(*args, **kwargs)
    except _Communicates:
        return None
    finally:
        thread.scope = outer
    return observer, nodes_between(outputs, (args, kwargs))


def _may_communicate(function: Any, modules: Sequence[torch.nn.Module]) -> bool:
    """Whether hooks run in a function, or units of FSDP1: both may gather weights. Without a module, nobody knows."""
    # The hooks of a block run around its `forward`, not in it.
    around = module_of(function) if getattr(function, "__name__", "") == "forward" else None
    return not modules or any(
        (inner is not around and (inner._forward_pre_hooks or inner._forward_hooks))
        or hasattr(inner, "_fsdp_wrapped_module")
        for module in modules
        for inner in module.modules()
    )


class _Communicates(BaseException):
    """A collective is about to be issued. A BaseException: an `except Exception` of the block does not catch it."""


class _Watch(Observer):
    """Stops before the first collective. Collectives that write a buffer have no row, so the tape does not see them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if rank() and str(func).startswith(("c10d.", "_c10d")):
            raise _Communicates
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Unkept(Tape):
    """Records which calls are made, and stores none of their outputs."""

    def handle(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        if op.kind == "decomposition":
            return super().handle(op, keyset, args, kwargs, product)
        if not op.is_attention:
            return self.pass_on(op, keyset, args, kwargs)
        self.callers = [*(self.callers or ()), caller()]
        if op.is_higher_order:
            # Eagerly it would take the memory that it is compiled to save, and its numbers do not matter here.
            outputs = torch_private.empty_outputs(op.op, args, kwargs)
        else:
            outputs = self.pass_on(op, keyset, args, kwargs)
        self.attention_calls.append((op, op.keys(args, kwargs)))
        return outputs
