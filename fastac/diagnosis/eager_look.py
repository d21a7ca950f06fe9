"""Runs compiled code once more, eagerly and observed, to see which attention calls it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fastac.diagnosis.autograd_graph import hidden_functions, nodes_between, tensors_of
from fastac.diagnosis.observer import Observer
from fastac.engine import torch_private
from fastac.engine.blocks import module_of
from fastac.engine.generators import devices_of, generators_preserved
from fastac.engine.region import unchanged
from fastac.engine.tape import Tape, thread
from fastac.policy import Policy
from fastac.registry import BoundOp


@torch_private.without_dynamo
def look(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> tuple[Observer, Sequence[type]]:
    """Run a region's function once more, eagerly. Generators and buffers are restored afterwards.

    Among several processes every rank does so, at the first region of the same block class.

    Returns:
        The observer, whose tape lists the attention calls, and autograd.Functions that hide an attention kernel.
    """
    module = module_of(function)
    tape = _Unkept(policy, owners=[])
    observer = Observer(module, (args, kwargs), tape)
    outer, thread.scope = thread.scope, None
    try:
        with (
            generators_preserved(devices_of(tensors_of((args, kwargs)))),
            buffers_preserved(module),
            # A checkpoint around the region counts what is saved: its hooks must not see what this run saves.
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unchanged),
            tape,
            observer,
            torch.compiler.set_stance("force_eager"),
        ):
            outputs = function(*args, **kwargs)
    finally:
        thread.scope = outer
    return observer, hidden_functions(nodes_between(outputs, (args, kwargs)), tape.owners or (), policy)


class _Unkept(Tape):
    """Records which calls are made, and keeps none of their outputs."""

    def meet(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        if op.kind == "decomposition":
            return super().meet(op, keyset, args, kwargs, product)
        if not op.is_attention:
            return self.run(op, keyset, args, kwargs)
        self.owners = [*(self.owners or ()), torch_private.newest_node()]
        if op.is_higher_order:
            # Eagerly it would take the memory that it is compiled to save, and its numbers do not matter here.
            outputs = torch_private.empty_outputs(op.op, args, kwargs)
        else:
            outputs = self.run(op, keyset, args, kwargs)
        self.made.append((op, op.keys(args, kwargs)))
        return outputs


@contextlib.contextmanager
def buffers_preserved(module: torch.nn.Module | None) -> Iterator[None]:
    """Restore a module's buffers at the end: the tensors themselves, and their values."""
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in (module.modules() if module is not None else ())
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            if getattr(owner, name) is not buffer:
                setattr(owner, name, buffer)
            if not torch.equal(buffer, value):  # writing would count as an in-place change
                buffer.detach().copy_(value)
