"""What a traced graph may not hold: constants that are the model's or are trained, random numbers in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch.fx import GraphModule

from fastac.engine import torch_private
from fastac.errors import FastacError
from fastac.graph import internals
from fastac.graph.leftovers import OUTSIDE, stores_gradients
from fastac.graph.nodes import constants, draws, is_backward, writer_of


def refuse_constants(graph_module: GraphModule, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise FastacError when a constant of the graph is a gradient, or wants one, or is written and an input's memory.

    tensors: parameters, buffers and arguments by name, and their stand-ins.
    """
    gradients = {torch_private.memory(t.grad): name for name, t in tensors if t.is_leaf and t.grad is not None}
    inputs = {torch_private.memory(tensor): (name, tensor) for name, tensor in tensors}
    for node, constant in constants(graph_module, torch.Tensor):
        memory, writer = torch_private.memory(constant), writer_of(node)
        if memory in gradients:
            raise stores_gradients(gradients[memory])
        name, tensor = inputs.get(memory, ("", constant))
        if name and writer is not None:
            what = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
            raise FastacError(
                f"trace: the step updates {what} {name} in place ({writer.target}), and not by way of the model or "
                f"its arguments. {OUTSIDE}"
            )
        if name and constant.requires_grad:
            raise FastacError(
                f"trace: the step computes with {name} from a place of its own, such as a list made before the trace. "
                f"Take it from the model, or the arguments, inside the step: model.get_parameter(...)."
            )
        if constant.requires_grad:
            raise FastacError(
                f"trace: the step uses a tensor of shape {tuple(constant.shape)} that requires grad and is neither a "
                f"parameter of the model nor an argument. Pass it as an argument, or pass a module that holds all that "
                f"is trained as the model."
            )


def refuse_redrawn(graph_module: GraphModule) -> None:
    """Raise FastacError when the backward draws random numbers: a recompute that was traced along draws others."""
    for node in graph_module.graph.nodes:
        if is_backward(node) and draws(node) and "backward" not in str(node.target):
            raise FastacError(
                f"trace: {node.target} draws random numbers in the backward. A torch.utils.checkpoint with dropout "
                f"inside does so in a graph, with other numbers than the forward's and wrong gradients. Use "
                f"fastac.checkpoint or fastac.enable in its place."
            )


def refuse_generators(graph_module: GraphModule, leaves: Sequence[object]) -> None:
    """Raise FastacError for a generator that the graph would go on drawing from, where the step may make a new one."""
    given = {internals.identity(leaf) for leaf in leaves if isinstance(leaf, torch.Generator)}
    for _, constant in constants(graph_module, torch.Generator):
        if internals.identity(constant) not in given:
            raise FastacError(
                "trace: the step draws from a generator that is no argument of it. One that the step makes would be "
                "made once, not in every call. Pass the generator, or what was drawn, as an argument."
            )


def running_module(model: torch.nn.Module, traceback: TracebackType | None) -> str:
    """The innermost module of the model among the calls of a traceback, for messages; empty where there is none."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and id(module) in names:
            name, kind = names[id(module)], type(module).__name__
            found = f" in {name} ({kind})" if name else f" in {kind}"
        traceback = traceback.tb_next
    return found
