"""What a step may not leave behind, for a graph would not: gradients in `.grad`, tensors in attributes of the model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastac.engine import torch_private
from fastac.errors import FastacError

OUTSIDE = "Return torch.autograd.grad(loss, parameters) from the step, and let the optimizer step outside."


@contextlib.contextmanager
def nothing_left(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put back what a traced step stores in the model, and raise FastacError where it stored something.

    tensors: the parameters, buffers and arguments, by the name for messages; of each, `.grad` is looked at. A step that
    failed for another reason leaves nothing either.
    """
    gradients = [(name, tensor, tensor.grad) for name, tensor in tensors.items() if tensor.is_leaf]
    containers: dict[int, tuple[str, Any, Any]] = {}
    for name, module in model.named_modules():
        _note(containers, name or type(module).__name__, vars(module))
    stored, kept = [], []
    tracing_thread = threading.get_ident()

    def refuse_here(optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() == tracing_thread:  # the hook is one for the process
            raise FastacError(
                f"trace: the step calls {type(optimizer).__name__}.step(), which updates parameters in place. {OUTSIDE}"
            )

    hook = register_optimizer_step_pre_hook(refuse_here)  # before it makes a state of stand-ins
    try:
        yield
    finally:
        hook.remove()
        for name, tensor, gradient in gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
                stored.append(name)
        for name, container, before in containers.values():
            kept += [f"{name}.{key}" for key in _put_back(container, before)]
    if stored:
        raise stores_gradients(stored[0])
    if kept:
        raise FastacError(
            f"trace: the step stores a tensor in the model ({kept[0]}), which the graph would not do in its calls. "
            f"Return it from the step. If it is a cache, call the model once before the trace, so that it is there."
        )


def stores_gradients(name: str) -> FastacError:
    """The error for a step that puts something into `.grad`, or changes what is there."""
    return FastacError(
        f"trace: the step stores gradients in .grad ({name}), as backward() does, and a graph returns what it "
        f"computes. {OUTSIDE}"
    )


def _note(containers: dict[int, tuple[str, Any, Any]], name: str, value: Any) -> None:
    """Take note of a container's items, and of those of dicts and lists in it."""
    if id(value) in containers or not isinstance(value, (dict, list)):
        return
    containers[id(value)] = name, value, dict(value) if isinstance(value, dict) else list(value)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        _note(containers, name if key in ("_parameters", "_buffers") else f"{name}.{key}", item)


def _put_back(container: Any, before: Any) -> list[object]:
    """Undo what put stand-ins into a container; returns where."""
    if isinstance(container, list):
        known = set(map(id, before))
        places: list[object] = [
            place for place, item in enumerate(container) if id(item) not in known and _holds_stand_in(item)
        ]
        if places:
            container[:] = before
        return places
    absent = object()
    keys = [key for key, item in container.items() if item is not before.get(key, absent) and _holds_stand_in(item)]
    for key in keys:
        if key in before:
            container[key] = before[key]
        else:
            del container[key]
    return keys


def _holds_stand_in(value: Any) -> bool:
    return any(torch_private.is_fake(leaf) for leaf in torch_private.tree_leaves(value))
