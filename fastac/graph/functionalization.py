"""functionalize: a graph without in-place operators, in which what a node computes depends on its inputs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fastac.engine import torch_private
from fastac.errors import FastacError
from fastac.graph import internals
from fastac.graph.nodes import constants, mark, marks, writer_of
from fastac.engine.generators import is_of_torch


def functionalize(graph_module: GraphModule) -> GraphModule:
    """The same graph with in-place operators replaced. An input that it changes is written once, at the end.

    A recompute that repeats an in-place operator, or leaves one out, is wrong without any error.
    Raises FastacError for a graph without traced values, for an operator whose writes can not be replaced, and for
    a changed input that shares its memory with another.
    """
    mode = internals.fake_mode_of(graph_module)
    if mode is None:
        raise FastacError(
            "functionalize: the inputs of the graph have no fake tensors as values (node.meta['val']). Trace it with "
            "fastac.graph.trace, or make_fx on fake tensors."
        )
    for node in graph_module.graph.nodes:
        if not internals.is_functional(node) and not is_of_torch(node.target):
            raise _written(node)
    for node, constant in constants(graph_module, torch.Tensor):
        writer = writer_of(node)
        if writer is not None:
            raise FastacError(
                f"functionalize: {writer.target} changes a tensor of shape {tuple(constant.shape)} in place that is "
                f"neither the model's nor an argument of the step. Pass it as an argument, or make it a buffer."
            )
    before = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = [_detached(node.meta.get("val")) for node in before]
    # Marks of a node are those that are current while it runs.
    run = torch.func.functionalize(Interpreter(graph_module).run, remove="mutations")
    with internals.retracing(mode):
        functional = make_fx(run)(*inputs)
    after = [node for node in functional.graph.nodes if node.op == "placeholder"]
    for old, new in zip(before, after, strict=True):
        new.name = old.name
        mark(new, **marks(old))
    functional.graph.eliminate_dead_code()
    functional.recompile()
    refuse_writes(functional)
    return functional


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def refuse_writes(graph_module: GraphModule) -> None:
    """Raise FastacError for an operator that writes, but for an input that gets its new value at the end."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node in graph_module.graph.nodes:
        if internals.is_functional(node):
            continue
        written = next((other for other in placeholders if node.args and other is node.args[0]), None)
        if node.target is not torch.ops.aten.copy_.default or written is None:
            raise _written(node)
        memory = _memory(written)
        shared = [other for other in placeholders if other is not written and _memory(other) == memory]
        if memory is not None and shared:
            raise FastacError(
                f"the step changes the input {written.name}, which shares its memory with {shared[0].name}: the graph "
                f"would not see the change there. Pass a copy."
            )


def _written(node: Node) -> FastacError:
    return FastacError(
        f"{node.target} writes its argument, and a graph in which it runs again, or not at all, would be wrong without "
        f"any error. Register the kernel as a functional torch.library.custom_op."
    )


def _memory(node: Node) -> object:
    value = node.meta.get("val")
    return torch_private.memory(value) if isinstance(value, torch.Tensor) else None
