"""trace: a training step as one graph, with the model's parameters and buffers among its inputs.

It knows nothing of checkpointing. Regions are in the graph because `fastac.checkpoint` marks them in any trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fastac import interception, preservation
from fastac.errors import FastacError
from fastac.graph import internals
from fastac.graph.nodes import STATE, draws, is_backward, mark
from fastac.torch_internals import tree_leaves


@dataclasses.dataclass(frozen=True)
class Traced:
    """A training step as a graph. Called as the step was, it runs the graph on what the model's state is now.

    graph_module: its inputs are the model's state, then the tensors and numbers of the arguments; its outputs are the
    leaves of what the step returned. described: what of the model and the arguments the trace took for granted.
    """

    graph_module: Any
    model: torch.nn.Module
    described: dict[str, Any]
    returned: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns, detached. Raises FastacError where the step would have to be traced anew."""
        state = state_of(self.model)
        now = describe(self.model, state, args, kwargs)
        if now != self.described:
            raise FastacError(_difference(self.described, now))
        leaves, _ = internals.tree_flatten((args, kwargs))
        with internals.as_traced():
            outputs = self.graph_module(*state.values(), *leaves)
        return internals.tree_unflatten(outputs, self.returned)


def trace(step: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """Trace step(*args, **kwargs): forward, loss, and `torch.autograd.grad`, whose gradients it returns.

    model: the module that the step uses; its parameters and buffers become inputs. Nothing runs, and no data is looked
    at: shapes, strides, dtypes, numbers among the arguments, train or eval mode and autocast are those of this call.
    Tensors that the step holds on to otherwise are constants of the graph: the same tensors, not copies.
    Raises FastacError for a step that stores gradients (`backward()`), draws random numbers that no operator draws,
    trains tensors that are neither the model's nor arguments, or has a torch.utils.checkpoint with dropout in it.
    """
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"trace: expected a model after the step, got {type(model).__name__}: trace(step, model, ...)"
        )
    interception.install()  # libraries of attention that were loaded since: not from within the trace
    state = state_of(model)
    described = describe(model, state, args, kwargs)
    leaves, structure = internals.tree_flatten((args, kwargs))
    returned = []

    stand_ins: dict[int, torch.Tensor] = {}
    cached = torch.is_autocast_cache_enabled()

    def flat(*inputs: Any) -> list[Any]:
        stand_ins.update(zip(map(id, (*state.values(), *leaves)), inputs, strict=True))
        with _with_state(model, stand_ins):
            # make_fx turns it off. With it a tensor is cast once, and its gradient summed before it is cast back.
            torch.set_autocast_cache_enabled(cached)
            positional, named = internals.tree_unflatten(_arguments(leaves, inputs[len(state) :]), structure)
            outputs = step(*positional, **named)
        _refuse_stored(dict(zip(state, inputs, strict=False)), inputs[len(state) :])
        flat_outputs, tree = internals.tree_flatten(outputs)
        returned.append(tree)
        return flat_outputs

    mode = internals.fake_mode()
    inputs = [internals.fake_of(value, mode) for value in (*state.values(), *leaves)]
    drawn = torch.get_rng_state(), random.getstate()
    try:
        with internals.tracing(mode, stand_ins):
            graph_module = make_fx(flat)(*inputs)
    except internals.LOOKED_AT_DATA as error:
        raise FastacError(
            f"trace: the step looks at the values of a tensor ({error.func}), by .item(), a branch or a boolean mask, "
            f"and a graph can not do one thing or another. Keep to sizes, or use fastac.enable without a trace."
        ) from error
    if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
        raise FastacError(
            "trace: the step seeds a generator or draws random numbers in Python, which would be the same in every "
            "call of the graph. Do that outside the step, and pass what was drawn."
        )
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, state, strict=False):
        mark(node, **{STATE: name})
    _refuse_strangers(graph_module)
    _refuse_redrawn(graph_module)
    _refuse_generators(graph_module, leaves)
    return Traced(graph_module, model, described, returned[-1])


@contextlib.contextmanager
def _with_state(model: torch.nn.Module, stand_ins: Mapping[int, Any]) -> Iterator[None]:
    """Give a model and all in it other parameters and buffers, by the id of those they stand in for.

    Raises FastacError when the step put another tensor into the place of one.
    """
    places: list[tuple[Any, str]]
    places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    places += [(module._buffers, name) for module in model.modules() for name in module._buffers]
    places = [(holder, name) for holder, name in places if holder[name] is not None]
    before = [holder[name] for holder, name in places]
    for holder, name in places:
        holder[name] = stand_ins[id(holder[name])]
    try:
        yield
        for (holder, name), mine in zip(places, before, strict=True):
            if holder.get(name) is not stand_ins[id(mine)]:
                raise FastacError(
                    f"trace: the step puts another tensor into the place of {name!r}, which a graph can not do for the "
                    f"model. Change it in place: self.{name}.copy_(...)."
                )
    finally:
        for (holder, name), mine in zip(places, before, strict=True):
            holder[name] = mine


def _arguments(leaves: Sequence[Any], fakes: Sequence[Any]) -> list[Any]:
    """Stand-ins for tensors, and all else itself: make_fx gives a generator in another guise."""
    return [fake if isinstance(leaf, torch.Tensor) else leaf for leaf, fake in zip(leaves, fakes, strict=True)]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name; a tied one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def describe(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a trace takes for granted, by what it is called in messages."""
    leaves, structure = internals.tree_flatten((args, dict(kwargs)))
    devices = preservation.devices_of([*state.values(), *leaves])
    return {
        "the model's parameters and buffers": {name: _kind(tensor) for name, tensor in state.items()},
        "the structure of the arguments": structure,
        "an argument": {f"leaf {place}": _kind(leaf) for place, leaf in enumerate(leaves)},
        "train or eval mode": [module.training for module in model.modules()],
        "autocast": {
            device.type: torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
            for device in devices
            if torch.amp.is_autocast_available(device.type)
        },
    }


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    what = next(key for key in before if before[key] != now[key])
    seen, found = before[what], now[what]
    if isinstance(seen, dict) and isinstance(found, dict):
        key = next(key for key in {**seen, **found} if seen.get(key) != found.get(key))
        what, seen, found = f"{what} ({key})", seen.get(key), found.get(key)
    return (
        f"the graph was traced with another value of {what}: {str(seen)[:200]} then, {str(found)[:200]} now. "
        f"Trace the step again for this one: fastac.graph.trace(step, model, ...)."
    )


def _refuse_stored(state: Mapping[str, Any], others: Any) -> None:
    """Raise FastacError when the step put gradients into `.grad`, which the graph would not do."""
    stored = [name for name, tensor in state.items() if tensor.grad is not None]
    stored += [
        "an argument" for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor) and leaf.grad is not None
    ]
    if stored:
        raise FastacError(
            f"trace: the step stores gradients in .grad ({stored[0]}), as backward() does, and a graph returns what it "
            f"computes. Return torch.autograd.grad(loss, parameters) from the step."
        )


def _refuse_strangers(graph_module: GraphModule) -> None:
    """Raise FastacError when a tensor that wants a gradient is a constant of the graph."""
    for node in graph_module.graph.nodes:
        constant = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and constant.requires_grad:
            raise FastacError(
                f"trace: the step uses a tensor of shape {tuple(constant.shape)} that requires grad and is neither a "
                f"parameter of the model nor an argument. Pass it as an argument, or pass a module that holds all that "
                f"is trained as the model."
            )


def _refuse_redrawn(graph_module: GraphModule) -> None:
    """Raise FastacError when the backward draws random numbers: a recompute that was traced along draws others."""
    for node in graph_module.graph.nodes:
        if is_backward(node) and draws(graph_module, node) and "backward" not in str(node.target):
            raise FastacError(
                f"trace: {node.target} draws random numbers in the backward. A torch.utils.checkpoint with dropout "
                f"inside does so in a graph, with other numbers than the forward's and wrong gradients. Use "
                f"fastac.checkpoint or fastac.enable in its place."
            )


def _refuse_generators(graph_module: GraphModule, leaves: Sequence[Any]) -> None:
    """Raise FastacError for a generator that the graph would go on drawing from, where the step may make a new one."""
    given = {internals.identity(leaf) for leaf in leaves if isinstance(leaf, torch.Generator)}
    for node in graph_module.graph.nodes:
        constant = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(constant, torch.Generator) and internals.identity(constant) not in given:
            raise FastacError(
                "trace: the step draws from a generator that is no argument of it. One that the step makes would be "
                "made once, not in every call. Pass the generator, or what was drawn, as an argument."
            )
