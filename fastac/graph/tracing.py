"""trace: a training step as one graph, with the model's parameters and buffers among its inputs.

It does nothing about checkpointing. Regions are in the graph because `fastac.checkpoint` marks them in any trace.
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

from fastac.engine import interception
from fastac.compile import tracing as annotation
from fastac.errors import FastacError
from fastac.graph import internals
from fastac.graph.description import (
    Description,
    argument_names,
    describe,
    difference,
    is_as,
    refuse_strange,
    state_of,
    steady,
)
from fastac.graph.leftovers import nothing_left, stores_gradients
from fastac.graph.nodes import STATE, mark, writer_of
from fastac.graph.refusals import refuse_constants, refuse_generators, refuse_redrawn, running_module
from fastac.graph.summary import summary
from fastac.policy import Policy


@dataclasses.dataclass(frozen=True, repr=False)
class Traced:
    """A training step as a graph. Called as the step was, it runs the graph on what the model's state is now.

    graph_module: its inputs are the model's state, then the tensors and numbers of the arguments; its outputs are the
    leaves of what the step returned. described: what of the model and the arguments the trace took for granted.
    policies: by region, what `fastac.graph.apply` applied; None before.
    """

    graph_module: Any
    model: torch.nn.Module
    described: Description
    returned: Any
    policies: Mapping[int, Policy] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns, detached. Raises FastacError where the step would have to be traced anew."""
        state = state_of(self.model)
        now = describe(self.model, state, args, kwargs, writes=self.described.shared is not None)
        if not is_as(now, self.described):
            raise FastacError(f"{self!r}: {difference(self.described, now, args, kwargs)}")
        leaves, _ = internals.tree_flatten((args, kwargs))
        with internals.as_traced():
            outputs = self.graph_module(*state.values(), *leaves)
        return internals.tree_unflatten(outputs, self.returned)

    def __repr__(self) -> str:
        graph_module, kind = self.graph_module, "traced"
        if not isinstance(graph_module, GraphModule):
            graph_module, kind = graph_module.graph_module, "compiled"
        return f"{kind} step of {type(self.model).__name__}: {summary(graph_module, self.policies)}"


def trace(step: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """Trace step(*args, **kwargs): forward, loss, and `torch.autograd.grad`, whose gradients it returns.

    model: the module that the step uses; its parameters and buffers become inputs. Nothing runs, and no data is looked
    at: shapes, strides, dtypes, numbers among the arguments, train or eval mode and autocast are those of this call.
    Tensors that the step holds on to otherwise are constants of the graph: the same tensors, not copies.
    Raises FastacError for a step that stores gradients (`backward()`), draws random numbers that no operator draws,
    trains tensors that are neither the model's nor arguments, updates parameters, stores tensors in the model, or has a
    torch.utils.checkpoint with dropout in it.
    """
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"trace: expected a model after the step, got {type(model).__name__}: trace(step, model, ...)"
        )
    interception.install()  # libraries of attention that were loaded since: not from within the trace
    refuse_strange(args, kwargs)
    state = state_of(model)
    described = describe(model, state, args, kwargs)
    leaves, structure = internals.tree_flatten((args, kwargs))
    names = [*state, *argument_names(args, kwargs)]
    tensors = [each for each in zip(names, (*state.values(), *leaves), strict=True) if _is_tensor(each[1])]
    returned: list[Any] = []

    stand_ins: dict[int, torch.Tensor] = {}
    cached = torch.is_autocast_cache_enabled()

    def flat(*inputs: Any) -> list[Any]:
        stand_ins.update(zip(map(id, (*state.values(), *leaves)), inputs, strict=True))
        with _with_state(model, stand_ins):
            # make_fx turns it off. With it a tensor is cast once, and its gradient summed before it is cast back.
            torch.set_autocast_cache_enabled(cached)
            positional, named = internals.tree_unflatten(_arguments(leaves, inputs[len(state) :]), structure)
            outputs = step(*positional, **named)
        _refuse_stored(names, inputs, gradients)
        flat_outputs, tree = internals.tree_flatten(outputs)
        returned.append(tree)
        return flat_outputs

    mode = internals.fake_mode()
    inputs = [internals.fake_of(value, mode) for value in (*state.values(), *leaves)]
    gradients = [_gradient_of(value) for value in inputs]
    drawn = torch.get_rng_state(), random.getstate()
    try:
        with nothing_left(model, dict(tensors)), annotation.expected(), internals.tracing(mode, stand_ins):
            graph_module = make_fx(flat)(*inputs)
    except internals.LOOKED_AT_DATA as error:
        where = running_module(model, error.__traceback__)
        raise FastacError(
            f"trace: the step looks at the values of a tensor ({error.func}){where}, by .item(), a branch or a boolean "
            f"mask, and a graph can not do one thing or another. Keep to sizes, or use fastac.enable without a trace."
        ) from error
    if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
        raise FastacError(
            "trace: the step seeds a generator or draws random numbers in Python, which would be the same in every "
            "call of the graph. Do that outside the step, and pass what was drawn."
        )
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, state, strict=False):
        mark(node, **{STATE: name})
    refuse_constants(graph_module, [*tensors, *(e for e in zip(names, inputs, strict=True) if _is_tensor(e[1]))])
    refuse_redrawn(graph_module)
    refuse_generators(graph_module, leaves)
    described = steady(described, describe(model, state, args, kwargs))
    if not any(map(writer_of, placeholders)):
        described = described._replace(shared=None)
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _gradient_of(value: Any) -> torch.Tensor | None:
    return value.grad if isinstance(value, torch.Tensor) and value.is_leaf else None


def _refuse_stored(names: Sequence[str], inputs: Sequence[Any], before: Sequence[torch.Tensor | None]) -> None:
    """Raise FastacError when the step put gradients into the `.grad` of stand-ins, which the graph would not do."""
    for name, value, gradient in zip(names, inputs, before, strict=True):
        if _gradient_of(value) is not gradient:
            raise stores_gradients(name)
