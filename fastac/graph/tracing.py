"""trace: a training step as one graph, with the model's parameters and buffers among its inputs.

Checkpointing is not done here: `fastac.checkpoint` marks its regions in any trace. A step that a graph would silently
not repeat is refused here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fastac.backends.plugins import prepare
from fastac.compiled import tracing
from fastac.engine import releases
from fastac.engine.beginning import devices_of, generators_preserved
from fastac.engine.torch_private import is_fake, tree_leaves, tree_map
from fastac.errors import FastacError
from fastac.graph import torch_private
from fastac.graph.nodes import REPEATS, STATE, draws, is_attention, is_backward, mark, marks, regions
from fastac.policy import Policy

Description = dict[str, object]
"""Everything that must be the same in every call as in the trace: its name in messages -> its value."""

_STORES_GRADIENTS = (
    "trace: the step stores gradients in .grad, as backward() does, which the graph would not do. Return "
    "torch.autograd.grad(loss, parameters) from the step, and let the optimizer step outside."
)


@dataclasses.dataclass(frozen=True, repr=False)
class Traced:
    """A training step as a graph. Called as the step was, it runs the graph on the present state of the model."""

    graph_module: GraphModule
    """Its inputs are the model's parameters and buffers, then the leaves of the arguments. Its outputs are leaves."""
    model: torch.nn.Module
    """The module that `trace` was given."""
    described: Description
    """Shapes, dtypes, numbers, train or eval mode and autocast of the trace. Every call must have the same."""
    returned: Any
    """The structure of the step's outputs."""
    policies: Mapping[int, Policy] | None = None
    """Region -> the policy that `apply` applied; None before."""
    compiled: Callable[..., Any] | None = None
    """Runs in the place of the graph after `compile`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph. Returns the step's outputs, detached. Raises FastacError if a call needs another trace."""
        state = _state_of(self.model)
        traced, called = self.described, _describe(self.model, state, args, kwargs)
        if called != traced:
            absent = object()
            name = next(key for key in {**called, **traced} if called.get(key, absent) != traced.get(key, absent))
            raise FastacError(
                f"{self!r} was called in another way than it was traced. {name}: {called.get(name, 'absent')} now, "
                f"{traced.get(name, 'absent')} when traced. Call it as it was traced, or trace the step again."
            )
        leaves, _ = torch_private.tree_flatten((args, kwargs))
        # The graph has the backward, and the casts of autocast, as nodes.
        with torch.no_grad(), torch_private.without_autocast():
            run = self.graph_module if self.compiled is None else self.compiled
            outputs = run(*state.values(), *leaves)
        return torch_private.tree_unflatten(outputs, self.returned)

    def __repr__(self) -> str:
        way = "traced" if self.compiled is None else "compiled"
        return f"{way} step of {type(self.model).__name__}: {summary(self.graph_module, self.policies)}"


def trace(step: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """Trace a training step: forward, loss, and `torch.autograd.grad`, whose gradients it returns. Nothing runs.

    Args:
        step: called as step(*args, **kwargs), on fake tensors. Tensors it holds are constants of the graph: the same
            tensors, not copies. Numbers and flags it reads from elsewhere are frozen as they are in this call.
        model: the module that the step uses; its parameters and buffers become inputs of the graph.
        args: tensors, numbers and strings, by themselves or in lists, tuples and dicts; modules.
        kwargs: the same, by name.

    Returns:
        A `Traced`. Call it like the step.

    Raises:
        FastacError: the step stores gradients (`backward()`) or tensors in the model, computes with parameters that
            are not the model's, draws random numbers in Python, or has a torch.utils.checkpoint with dropout in it.

    Example:
        >>> def step(video, timestep, text):
        ...     loss = model(video, timestep, text, return_dict=False)[0].square().mean()
        ...     return loss.detach(), torch.autograd.grad(loss, parameters)
        >>> traced = fastac.graph.trace(step, model, video, timestep, text)
    """
    releases.need_traces()
    prepare()  # looks for attention libraries that were loaded since: it must not do that within the trace
    state = _state_of(model)
    described = _describe(model, state, args, kwargs)
    _refuse_objects(args, kwargs)
    flat = _FlatStep(step, model, state, args, kwargs)
    with _nothing_drawn():
        graph_module = flat.trace()
    # The inputs are the model's state, and then the arguments: these get no mark.
    for node, name in zip(graph_module.graph.find_nodes(op="placeholder"), state, strict=False):
        mark(node, **{STATE: name})
    _refuse_constants(graph_module, flat.values)
    _refuse_redrawn(graph_module)
    return Traced(graph_module, model, described, flat.returned)


class _FlatStep:
    """A step as a function of flat inputs, for make_fx: the model's parameters and buffers, then the arguments."""

    returned: Any
    """The structure of the outputs, once the step was traced."""

    def __init__(self, step: Callable[..., Any], model: torch.nn.Module, state: Any, args: Any, kwargs: Any) -> None:
        self.step, self.model = step, model
        self.leaves, self.structure = torch_private.tree_flatten((args, kwargs))
        self.values = [*state.values(), *self.leaves]
        self.fakes: dict[int, torch.Tensor] = {}  # by the id of the tensor in whose place it is
        self.caches_casts = torch.is_autocast_cache_enabled()

    def trace(self) -> GraphModule:
        """The graph of the step."""
        mode, inputs = torch_private.fakes_of(self.values)
        with tracing.expected(self.model), torch_private.tracing(mode, self.fakes):
            return make_fx(self.run)(*inputs)

    def run(self, *inputs: Any) -> list[Any]:
        """Call the step with inputs in the place of the values. Returns the leaves of its outputs."""
        self.fakes.update(zip(map(id, self.values), inputs, strict=True))
        # make_fx wraps a generator: only tensors are replaced.
        replaced = [self.fakes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = torch_private.tree_unflatten(replaced, self.structure)
        with _nothing_stored(self.model, [*self.values, *inputs]), _with_state(self.model, self.fakes):
            # make_fx turns autocast's cache off (pytorch 84035). In eager mode a tensor is cast once, and its gradients
            # are summed before they are cast back. Without the cache the graph would round differently.
            torch.set_autocast_cache_enabled(self.caches_casts)
            outputs, self.returned = torch_private.tree_flatten(self.step(*args, **kwargs))
        return outputs


def summary(graph_module: GraphModule, policies: Mapping[int, Policy] | None) -> str:
    """One line for the log: 2 regions (attn_only), 4 attention calls, 0 run again, 308 nodes recomputed."""
    recomputed = [node for node in graph_module.graph.nodes if REPEATS in marks(node)]
    repeated = sum(map(is_attention, recomputed))
    calls = f"{sum(map(is_attention, graph_module.graph.nodes)) - repeated} attention calls"
    if policies is None:
        return f"{len(regions(graph_module))} regions, {calls}, no policy"
    names = ", ".join(dict.fromkeys(map(str, policies.values())))
    return f"{len(policies)} regions ({names}), {calls}, {repeated} run again, {len(recomputed)} nodes recomputed"


# Calls that differ from the traced one


def _refuse_objects(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise FastacError for an argument with attributes: tensors inside would be the same in every call."""
    for name, leaf in _arguments(args, kwargs).items():
        if hasattr(leaf, "__dict__") and not callable(leaf) and not isinstance(leaf, (torch.Tensor, enum.Enum)):
            raise FastacError(
                f"trace: {name} is a {type(leaf).__name__}, and tensors inside it would be the same in every call of "
                f"the graph. Pass tensors, numbers and strings, also in lists, tuples and dicts; or register the class "
                f"by torch.utils._pytree.register_dataclass."
            )


def _state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name. A tied parameter is listed once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of the arguments: argument[0], argument['batch']['video']."""
    leaves, _ = torch_private.tree_flatten_with_path((args, dict(kwargs)))
    return {"argument" + "".join(map(str, path[1:])): leaf for path, leaf in leaves}


def _describe(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Description:
    values = {**state, **_arguments(args, kwargs)}
    # A graph has one input for a tensor in two places. So calls must have the same tensor in both places, too.
    first: dict[int, str] = {}
    described: Description = {
        f"module {name or 'itself'}": "train mode" if module.training else "eval mode"
        for name, module in model.named_modules()
    }
    for name, value in values.items():
        described[name] = value
        if isinstance(value, torch.Tensor):
            same = first.setdefault(id(value), name)
            described[name] = tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, same
    for device_type in {device.type for device in devices_of(values.values())}:
        if torch.amp.is_autocast_available(device_type):
            enabled = torch.is_autocast_enabled(device_type)
            described[f"autocast on {device_type}"] = torch.get_autocast_dtype(device_type) if enabled else "off"
    return described


# Steps that a graph would silently not repeat


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Restore generators. Raise if the step moved one: operators on fake tensors draw nothing."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    with generators_preserved():
        yield
        has_drawn = not torch.equal(torch_state, torch.get_rng_state()) or python_state != random.getstate()
    if has_drawn:
        raise FastacError(
            "trace: the step seeds a generator or draws random numbers in Python, which would be the same in every "
            "call of the graph. Do that outside the step, and pass the numbers as arguments."
        )


@contextlib.contextmanager
def _with_state(model: torch.nn.Module, fakes: Mapping[int, Any]) -> Iterator[None]:
    """Give a model fake parameters and buffers. fakes: by the id of the tensor. Raise if the step replaces one."""
    holders: list[dict[str, Any]]
    holders = [holder for module in model.modules() for holder in (module._parameters, module._buffers)]
    originals = list(map(dict, holders))
    for holder in holders:
        holder.update({name: fakes[id(tensor)] for name, tensor in holder.items() if tensor is not None})
    faked = list(map(dict, holders))
    try:
        yield
        for holder, fake_tensors in zip(holders, faked, strict=True):
            if replaced := [name for name, tensor in fake_tensors.items() if holder.get(name) is not tensor]:
                raise FastacError(
                    f"trace: the step replaces {replaced[0]!r} of the model by another tensor, which the graph would "
                    f"not do. Change it in place: self.{replaced[0]}.copy_(...)."
                )
    finally:
        for holder, tensors in zip(holders, originals, strict=True):
            holder.update(tensors)


@contextlib.contextmanager
def _nothing_stored(model: torch.nn.Module, values: Sequence[Any]) -> Iterator[None]:
    """Undo what a trace stores: gradients in `.grad`, fake tensors in attributes of modules. Raise if it stored any."""
    leaves = [value for value in values if isinstance(value, torch.Tensor) and value.is_leaf]
    # A second backward() adds to `.grad` in place: the tensor is the same, and only its version shows it.
    gradients = [(leaf, leaf.grad, getattr(leaf.grad, "_version", None)) for leaf in leaves]
    # Containers are copied: a step may append to a list, fill a dict, or register a buffer.
    attributes = [(name, module, tree_map(lambda leaf: leaf, vars(module))) for name, module in model.named_modules()]
    stored: list[str] = []
    changed = False
    try:
        yield
    finally:
        for leaf, gradient, version in gradients:
            changed = changed or leaf.grad is not gradient or getattr(gradient, "_version", None) != version
            leaf.grad = gradient
        for name, module, originals in attributes:
            for key, value in list(vars(module).items()):
                if any(map(is_fake, tree_leaves(value))):
                    stored.append(f"{name}.{key}".lstrip("."))
                    vars(module).pop(key)
                    vars(module).update({key: originals[key]} if key in originals else {})
    if changed:
        raise FastacError(_STORES_GRADIENTS)
    if stored:
        raise FastacError(
            f"trace: the step stores a tensor in the model ({stored[0]}), which the graph would not do in its calls. "
            f"Return it from the step. If it is a cache, call the model once before the trace, so that it is there."
        )


def _refuse_constants(graph_module: GraphModule, inputs: Sequence[Any]) -> None:
    """Raise FastacError for a constant of the graph that is changed, or made anew, in each call of the step.

    The graph would not return the gradients of a trained tensor; the `.grad` of an input is another tensor after
    zero_grad(); and a generator that the step makes would draw the same numbers in each step.
    """
    gradients = [value.grad for value in inputs if isinstance(value, torch.Tensor) and value.is_leaf]
    # make_fx wraps a generator, so it cannot be found among the arguments by identity: any argument counts.
    has_generator = any(isinstance(value, torch.Generator) for value in inputs)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        if constant is not None and any(constant is gradient for gradient in gradients):
            raise FastacError(_STORES_GRADIENTS)
        if isinstance(constant, torch.Generator) and not has_generator:
            raise FastacError(
                "trace: the step draws from a generator that it makes or holds; the graph would hold the generator of "
                "this call. Pass the generator as an argument."
            )
        if isinstance(constant, torch.Tensor) and constant.requires_grad:
            raise FastacError(
                f"trace: the step uses a tensor of shape {tuple(constant.shape)} that requires grad and is neither an "
                f"argument nor taken from the model inside the step. Pass it as an argument, take it by "
                f"model.get_parameter(...), or pass a module that holds everything that is trained as the model."
            )


def _refuse_redrawn(graph_module: GraphModule) -> None:
    """Raise FastacError if the backward draws random numbers: it is a recompute, and draws others than the forward."""
    # torch's checkpoint restores generators by calls that make_fx does not record (pytorch#179048 says so).
    for node in graph_module.graph.nodes:
        if is_backward(node) and draws(node) and "backward" not in str(node.target):
            raise FastacError(
                f"trace: {node.target} draws random numbers in the backward. A torch.utils.checkpoint with dropout "
                f"inside does so in a graph, with other numbers than the forward's and wrong gradients. Use "
                f"fastac.checkpoint or fastac.enable in its place."
            )
