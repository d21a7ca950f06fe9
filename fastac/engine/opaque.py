"""make_visible: gives the kernel inside an autograd.Function a dispatcher op, so that its output can be saved.

A kernel that Triton, CuTe or pybind launches is seen by nobody: autograd knows the Function, the dispatcher nothing.
`make_visible` puts its forward inside an op, in place. The op returns the outputs and whatever the forward saved for
backward beyond its inputs; on replay both come from the tape, and the kernel does not run. What the tensors mean, and
what the forward set on its context, goes beside the op as a `Companion`, which the tape keeps with the entry.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastac import registry
from fastac.engine import flops, interception, torch_private
from fastac.engine.tape import engine, held_bytes, thread
from fastac.errors import FastacError
from fastac.registry import (
    ALWAYS,
    KEYS_DIMENSION,
    OPAQUE_NAMESPACE,
    AttentionOp,
    Flops,
    OpaqueFunction,
    check_layout,
    check_pattern,
    check_texts,
)

logger = logging.getLogger("fastac")

_library = torch.library.Library(OPAQUE_NAMESPACE, "FRAGMENT")
_handles = itertools.count()


class _State:
    """What was made visible in this process, for good, and what is made so once its library is loaded."""

    def __init__(self) -> None:
        self.visible: dict[str, tuple[type[torch.autograd.Function], tuple[Any, ...]]] = {}
        self.known: list[OpaqueFunction] = []
        self.settled: set[tuple[OpaqueFunction, str]] = set()
        self.modules: object = None
        self.lock = threading.RLock()


state = _State()


@dataclasses.dataclass(frozen=True)
class _Input:
    """An input of the call among what its forward set on the context. Itself it would hold the graph that holds it."""

    place: int


class Companion:
    """What the tensors that an opaque op returned mean, and what its forward set on the context besides.

    A tensor is written as its place in the list, an input of the call as -2 - its place among the inputs, None as -1.
    """

    materializes: bool | None = None
    attributes: Mapping[str, Any] = {}

    def __init__(self, single: bool, outputs: list[int], saved: list[int], constant: list[int]) -> None:
        self.single = single
        self.outputs = outputs
        self.saved = saved
        self.constant = constant

    def give(self, context: Any, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ran: bool) -> Any:
        """The outputs of the forward, and on the context what it had saved there. ran: it ran on this very context."""
        outputs, saved, constant = (
            [None if one == -1 else inputs[-2 - one] if one < -1 else tensors[one] for one in places]
            for places in (self.outputs, self.saved, self.constant)
        )
        context.save_for_backward(*saved)
        if constant:
            context.mark_non_differentiable(*constant)
        if not ran:
            vars(context).update(
                torch_private.tree_map(
                    lambda one: inputs[one.place] if isinstance(one, _Input) else one, self.attributes
                )
            )
            if self.materializes is not None:
                context.set_materialize_grads(self.materializes)
        return outputs[0] if self.single else tuple(outputs)

    def extra_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the tensors that are none of the outputs."""
        return held_bytes([one for place, one in enumerate(tensors) if place not in self.outputs])


class _Call:
    """A call on its way through the dispatcher, which takes tensors and numbers only."""

    companion: Companion
    ran = False

    def __init__(
        self, forward: Callable[..., Any], context: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]
    ) -> None:
        self.forward = forward
        self.context = context
        self.args = args
        self.tensors = tensors

    def run(self) -> list[torch.Tensor]:
        """Run the forward itself. Returns its outputs and what it saved beyond its inputs."""
        context, materializes = self.context, None
        set_materialize_grads = context.set_materialize_grads

        def noted(value: bool) -> None:  # it can be set, and not be read
            nonlocal materializes
            materializes = value
            set_materialize_grads(value)

        context.set_materialize_grads = noted
        try:
            outputs = self.forward(context, *self.args)
        finally:
            del context.set_materialize_grads
        tensors = self._pack(outputs)
        # An integer input may be a choice, of which recompute makes another: that of the forward stays.
        places = {id(tensor): _Input(place) for place, tensor in enumerate(self.tensors) if tensor.is_floating_point()}
        self.companion.attributes = torch_private.tree_map(
            lambda one: places.get(id(one)) or torch_private.without_base(one), dict(vars(context))
        )
        self.companion.materializes = materializes
        self.ran = True
        return tensors

    def _pack(self, outputs: Any) -> list[torch.Tensor]:
        single = not isinstance(outputs, tuple)  # a list is no tuple of outputs, to autograd
        outputs = (outputs,) if single else outputs
        to_save, constant, dirty = torch_private.given_to(self.context)
        _check_outputs(self.context, outputs, dirty)
        tensors: list[torch.Tensor] = []
        places: dict[int, int] = {}

        def places_of(values: Iterable[Any], inputs: Mapping[int, int]) -> list[int]:
            found = []
            for value in values:
                if value is not None and id(value) not in inputs and id(value) not in places:
                    places[id(value)] = len(tensors)
                    tensors.append(value)
                found.append(-1 if value is None else inputs.get(id(value), places.get(id(value), -1)))
            return found

        inputs = {id(tensor): -2 - place for place, tensor in enumerate(self.tensors)}
        given = places_of(outputs, inputs)
        # An input of whole numbers may be a choice of blocks, which recompute must not make again: kept like an output.
        floating = {id(t): -2 - place for place, t in enumerate(self.tensors) if t.is_floating_point()}
        self.companion = Companion(single, given, places_of(to_save, floating), places_of(constant, floating))
        return tensors


def _check_outputs(context: Any, outputs: tuple[Any, ...], dirty: Sequence[Any]) -> None:
    name = context.name().removesuffix("Backward")
    if dirty:
        raise FastacError(
            f"{name} calls mark_dirty: on replay its kernel does not run, and the write would be missing. "
            f'Return a new tensor instead, or use policy="full" for this block.'
        )
    for output in outputs:
        if output is not None and not isinstance(output, torch.Tensor):
            raise FastacError(
                f"{name} returns a {type(output).__name__}, which cannot be saved: make_visible needs outputs that "
                f'are tensors or None. Keep other values on the context, or use policy="full" for this block.'
            )


def _kernel(first: torch.Tensor, others: list[torch.Tensor], keys: int, draws: bool, handle: int) -> list[torch.Tensor]:
    call: _Call = engine.opaque[handle]
    return call.run()


def make_visible(
    function: type[torch.autograd.Function],
    *,
    name: str = "",
    backend: str = "opaque",
    key: str = "",
    layout: str = "bshd",
    max_kv: str | None = None,
    dropout: str | None = ALWAYS,
    flops: Flops = Flops(),  # noqa: B008 it is frozen
) -> torch._ops.OpOverload:
    """Make the forward of an autograd.Function savable, in place: also where its `apply` was captured before.

    Outside checkpointed regions the forward runs as before. torch counts the FLOPs of the forward; the backward stays
    Python that launches a kernel. Under torch.compile the Function is traced as it is, so its call is recomputed, and
    a warning says so.

    Args:
        function: its outputs are tensors or None.
        name: of the op, unique; by default that of the class.
        backend, layout, max_kv, dropout, flops: as in fastac.AttentionOp, by the names of the forward's parameters.
        key: the parameter that holds the keys; by default the second tensor it is called with.

    Returns:
        The op, `fastac_opaque::<name>`.

    Raises:
        FastacError: a Function with `setup_context`, an argument that its forward does not have, a name that another
            Function has; when it is called in a region, `mark_dirty` and outputs that are no tensors.

    Example:
        >>> fastac.make_visible(MyAttention, key="k", layout="bhsd", dropout=None)
    """
    options = (key, layout, max_kv, dropout, flops)
    for given, (visible, options_given) in state.visible.items():
        if visible is function and name in ("", given) and options == options_given:
            return _op(given)
        if visible is function:
            raise FastacError(
                f"make_visible: {function.__qualname__} is visible already, as {given!r}, with other options. "
                f"Functions of known libraries are made visible by fastac.enable: call make_visible before it."
            )
    if not name and isinstance(function, type):
        name = own = re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
        while name in state.visible:  # defined again, in a notebook or a local scope
            name = f"{own}_{next(_handles)}"
    original = _forward_of(function, name)
    arguments = _Arguments(function, original, *options)
    if not hasattr(getattr(torch.ops, OPAQUE_NAMESPACE), name):  # else it was not registered, when this was tried
        _library.define(f"{name}(Tensor first, Tensor[] others, int keys, bool draws, int handle) -> Tensor[]")
        _library.impl(name, _kernel, "CompositeExplicitAutograd")
    op = _op(name)
    _count_flops(op, arguments)
    registry.register(
        AttentionOp(backend=backend, namespace=OPAQUE_NAMESPACE, name=name, key="first", max_kv="keys", dropout="draws")
    )

    @functools.wraps(original)  # a subclass may inherit it, and is read by its arguments
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _warn_compiled(name)
            return original(ctx, *args, **kwargs)
        tensors = _tensors_in(args)
        # Not by `apply`: another Function that calls this forward as a helper may pass what it likes, or, as a subclass
        # that is visible itself, a context whose call is on its way.
        by_hand = bool(kwargs) or not isinstance(ctx, torch.autograd.function.FunctionCtx)
        by_hand = by_hand or "set_materialize_grads" in vars(ctx)
        if by_hand or not tensors or not _is_watched(tensors):
            return original(ctx, *args, **kwargs)
        handle = next(_handles)
        call = engine.opaque[handle] = _Call(original, ctx, args, tensors)
        try:
            flat = op(tensors[0], tensors[1:], arguments.keys(args, tensors), arguments.draws(args), handle)
        finally:
            del engine.opaque[handle]
        return call.companion.give(ctx, flat, tensors, call.ran)

    state.visible[name] = function, options
    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    logger.info("%s.%s is visible as %s::%s", function.__module__, function.__qualname__, OPAQUE_NAMESPACE, name)
    return op


class _Arguments:
    """Reads the arguments of a forward that was made visible, by the names that make_visible was given."""

    def __init__(
        self,
        function: type,
        forward: Callable[..., Any],
        key: str,
        layout: str,
        max_kv: str | None,
        dropout: str | None,
        flops: Flops,
    ) -> None:
        self.function, self.layout, self.max_kv, self.dropout, self.key, self.flops = (
            function,
            layout,
            max_kv,
            dropout,
            key,
            flops,
        )
        self.parameters = dict(list(inspect.signature(forward).parameters.items())[1:])
        self.places = {parameter: place for place, parameter in enumerate(self.parameters)}
        named = (key, max_kv, None if dropout == ALWAYS else dropout, *flops.offsets, *flops.blocks)
        for parameter in filter(None, named):
            if parameter not in self.parameters:
                raise FastacError(
                    f"make_visible: the forward of {function.__qualname__} has no argument {parameter!r}. "
                    f"It has {', '.join(self.parameters)}."
                )
        check_layout(layout, flops, f"make_visible: {function.__qualname__}")

    def value(self, parameter: str, args: tuple[Any, ...]) -> Any:
        """The value that a call has for a parameter."""
        place = self.places[parameter]
        return args[place] if place < len(args) else self.parameters[parameter].default

    def key_of(self, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> torch.Tensor:
        """The key tensor of a call."""
        if self.key and (given := self.value(self.key, args)) is not None:
            return given  # type: ignore[no-any-return]
        large = [tensor for tensor in tensors if tensor.dim() > 2]
        return large[min(1, len(large) - 1)] if large else tensors[0]

    def keys(self, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
        """Over how many keys a call attends. Raises FastacError where the key tensor does not have the layout."""
        given = self.value(self.max_kv, args) if self.max_kv else None
        if isinstance(given, int):  # a tensor would have to be waited for
            return given
        tensor = self.key_of(args, tensors)
        if tensor.dim() < -KEYS_DIMENSION[self.layout]:
            raise FastacError(
                f"{self.function.__qualname__} was made visible with layout={self.layout!r}, and its key tensor has "
                f"the shape {tuple(tensor.shape)}. Name the key and its layout: fastac.make_visible(..., key=...)."
            )
        return int(tensor.shape[KEYS_DIMENSION[self.layout]])

    def draws(self, args: tuple[Any, ...]) -> bool:
        """Whether the kernel may draw random numbers in a call."""
        if self.dropout is None or self.dropout == ALWAYS:
            return self.dropout is not None
        return bool(self.value(self.dropout, args))


def _count_flops(op: torch._ops.OpOverload, arguments: _Arguments) -> None:
    def formula(*args: Any, out_val: Any) -> int:
        call: _Call = engine.opaque[args[-1]]
        return flops.Products(
            output=out_val[0],
            key=arguments.key_of(call.args, call.tensors),
            keys=args[2],
            offsets=[arguments.value(name, call.args) for name in arguments.flops.offsets],
            blocks=[arguments.value(name, call.args) for name in arguments.flops.blocks],
        ).forward()

    flops.add(op, formula)


def is_visible(function: type) -> bool:
    """Whether make_visible was called for an autograd.Function."""
    return any(visible is function for visible, _ in state.visible.values())


def know(*functions: OpaqueFunction) -> None:
    """Add Functions that are made visible as soon as their module is loaded and a model is enabled.

    Raises FastacError for one that is not well-formed.
    """
    check(*functions)
    state.known.extend(functions)
    state.modules = None


def check(*functions: OpaqueFunction) -> None:
    """Raise FastacError for a Function that is not well-formed."""
    for function in functions:
        check_texts(function, "OpaqueFunction")
        check_pattern(function.module, f"OpaqueFunction: module of {function.name!r}")
        check_layout(function.layout, function.flops, f"OpaqueFunction: {function.name}")


def known_backends() -> set[str]:
    """The backends of the Functions that are known, whether their modules are loaded or not."""
    return {known.backend for known in state.known}


def make_known_visible() -> None:
    """Make every known Function visible whose module is loaded. Cheap when no module was loaded since.

    One that cannot be made visible stays as it is, and a warning says why: its backend is refused where it is used.
    """
    if (loaded := interception.loaded_modules()) == state.modules:
        return
    with state.lock:
        complete = True
        absent: dict[OpaqueFunction, str] = {}
        for module_name, module in sys.modules.copy().items():  # other threads import meanwhile; copy() is atomic
            for known in state.known:
                if (known, module_name) not in state.settled and re.fullmatch(known.module, module_name):
                    complete = _settle(known, module_name, module) and complete
                    absent.setdefault(known, module_name)
        for known, module_name in absent.items() if complete else ():
            if not any(function.__name__ == known.name for function, _ in state.visible.values()):
                logger.warning("%s has no %s, which fastac was to make visible", module_name, known.name)
        state.modules = loaded if complete else None


def _settle(known: OpaqueFunction, module_name: str, module: Any) -> bool:
    """Make one Function visible, or say why not. Returns False where its module is still being imported."""
    if module is None:
        return True  # Python's way to forbid an import
    # Not of the module itself: a lazy one would load what it likes.
    function = getattr(module, "__dict__", {}).get(known.name)
    if function is None and getattr(getattr(module, "__spec__", None), "_initializing", False):
        return False
    state.settled.add((known, module_name))
    if function is not None and not is_visible(function):  # else by the user, whose options count
        try:
            options = {name: value for name, value in vars(known).items() if name not in ("module", "name")}
            make_visible(function, **options)
        except FastacError as error:
            logger.warning("%s.%s cannot be saved: %s", module_name, known.name, error)
    return True


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, those in lists and tuples too."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found


def _forward_of(function: Any, name: str) -> Callable[..., Any]:
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise FastacError(f"make_visible: expected a subclass of torch.autograd.Function, got {function!r}")
    if function.setup_context is not torch.autograd.Function.setup_context:
        raise FastacError(
            f"make_visible: {function.__qualname__} has a setup_context, which gets at the context apart from the "
            f"forward. Write both as one forward(ctx, ...), or register its kernel as a torch.library.custom_op."
        )
    if name in state.visible:
        raise FastacError(
            f"make_visible: the name {name!r} is taken by {state.visible[name][0].__qualname__}. Give another."
        )
    if not name.isidentifier():
        raise FastacError(f"make_visible: {name!r} is no name for an op. Use letters, digits and underscores.")
    return function.forward


def _op(name: str) -> torch._ops.OpOverload:
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, OPAQUE_NAMESPACE), name).default
    return op


def _is_watched(tensors: Sequence[Any]) -> bool:
    """Whether somebody is there who saves or counts the call. Elsewhere, and in traces, the forward just runs."""
    if torch_private.in_proxy_trace():
        return False
    for tensor in tensors:
        if torch_private.is_fake(tensor) or is_traceable_wrapper_subclass(tensor):
            return False  # a tensor without data, or one such as DTensor, which an op must be taught
    listening = thread.scope is not None or bool(engine.listeners) or bool(engine.answered)
    return listening or torch_private.in_dispatch_mode()


@torch_private.constant_under_dynamo
def _warn_compiled(name: str) -> None:
    logger.warning(
        "%s::%s is in a compiled graph, where its kernel has no op: a checkpointed region there recomputes it. "
        "Register the kernel as a torch.library.custom_op to have it saved.",
        OPAQUE_NAMESPACE,
        name,
    )
