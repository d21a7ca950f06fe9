"""make_visible: gives the kernel inside an autograd.Function a dispatcher op, so that its output can be saved.

A kernel that Triton, CuTe or pybind launches has no op: autograd sees the Function, the dispatcher sees nothing.
`make_visible` puts the Function's forward inside an op, in place. The op returns the outputs of the forward and the
tensors beyond its inputs that the forward saved for backward. On replay both come from the tape, and the kernel does
not run. A `Companion` says how the forward used these tensors; the tape keeps it with the entry.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastac import registry
from fastac.engine import interception, torch_private
from fastac.engine.beginning import tensors_in
from fastac.engine.process import process, thread
from fastac.engine.tape import storage_bytes
from fastac.errors import FastacError
from fastac.registry import ALWAYS, OPAQUE_NAMESPACE, AttentionOp, Flops, OpaqueFunction, may_draw, number_of_keys
from fastac.registry.flops import add_formula, named_arguments, products

logger = logging.getLogger("fastac")

_library = torch.library.Library(OPAQUE_NAMESPACE, "FRAGMENT")
_ops = getattr(torch.ops, OPAQUE_NAMESPACE)
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for a tensor of a call. An input itself would hold the graph that holds it, and leak."""

    # False: it is one of the tensors that the op returns.
    is_input: bool
    number: int


@dataclasses.dataclass
class Companion:
    """How a forward used the tensors of its call."""

    # Of the forward: one output, or a tuple.
    outputs: Any
    # Given to save_for_backward, mark_non_differentiable and set_materialize_grads.
    saved: list[Any]
    constant: list[Any]
    materializes: list[bool]
    # Other attributes of the context.
    attributes: Mapping[str, Any]
    # Name of the Function, and numbers of the tensors that it wrote among those of its arguments.
    function: str
    written: list[int]

    def check(self) -> None:
        """Raise FastacError for a call that cannot be replayed because it wrote a tensor of its arguments."""
        # The call itself is right, and only its replay would be wrong: not an error if the policy does not save it.
        if self.written:
            raise FastacError(
                f"{self.function} writes into the tensor number {self.written[0]} of its arguments. A saved call does "
                f"not run again, so that would be missing in recompute. Change that, or use "
                f'policy="full" for this block.'
            )

    def give(self, context: Any, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Set up the context as the forward did. Returns the outputs."""

        def tensor(value: Any) -> Any:
            return (inputs if value.is_input else tensors)[value.number] if isinstance(value, _Place) else value

        context.save_for_backward(*map(tensor, self.saved))
        if self.constant:
            context.mark_non_differentiable(*map(tensor, self.constant))
        for value in self.materializes:
            context.set_materialize_grads(value)
        vars(context).update(torch_private.tree_map(tensor, self.attributes))
        return torch_private.tree_map(tensor, self.outputs)

    def extra_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the tensors that are not among the outputs."""
        outputs = torch_private.tree_leaves(self.outputs)
        return storage_bytes([tensor for n, tensor in enumerate(tensors) if _Place(False, n) not in outputs])


@dataclasses.dataclass
class _KernelCall:
    """A call on its way through the dispatcher, which takes tensors and numbers only."""

    forward: Callable[..., Any]
    context: Any
    args: tuple[Any, ...]
    # The tensors among the arguments.
    tensors: list[torch.Tensor]
    companion: Companion | None = None

    def run(self) -> list[torch.Tensor]:
        """Run the forward. Returns its outputs, and the tensors that it saved beyond its inputs."""
        context = self.context
        versions = torch_private.versions(self.tensors)
        materializes: list[bool] = []
        context.set_materialize_grads = materializes.append  # the context does not say what it was given
        try:
            outputs = self.forward(context, *self.args)
        finally:
            del context.set_materialize_grads
        to_save, constant, dirty = torch_private.given_to(context)
        _check_outputs(context, outputs, dirty)
        # Integers are saved as outputs are: they may be chosen blocks, and recompute may choose others.
        places = {id(tensor): _Place(True, n) for n, tensor in enumerate(self.tensors) if tensor.is_floating_point()}
        attributes = torch_private.tree_map(
            lambda value: places.get(id(value)) or torch_private.without_base(value), dict(vars(context))
        )
        tensors: list[torch.Tensor] = []

        def place_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and id(value) not in places:
                places[id(value)] = _Place(False, len(tensors))
                tensors.append(value)
            return places.get(id(value))

        returned = torch_private.tree_map(place_of, outputs)
        saved, constants = ([place_of(tensor) for tensor in tensors_given] for tensors_given in (to_save, constant))
        pairs = zip(versions, torch_private.versions(self.tensors), strict=True)
        written = [number for number, (earlier, later) in enumerate(pairs) if earlier != later]
        self.companion = Companion(returned, saved, constants, materializes, attributes, _function(context), written)
        return tensors


def _function(context: Any) -> str:
    """The name of the Function that a context belongs to."""
    name: str = context.name()
    return name.removesuffix("Backward")


def _check_outputs(context: Any, outputs: Any, dirty: Sequence[Any]) -> None:
    sequence = outputs if isinstance(outputs, tuple) else (outputs,)
    others = [type(value).__name__ for value in sequence if not isinstance(value, torch.Tensor | None)]
    if dirty or others:
        raise FastacError(
            f"{_function(context)} {'calls mark_dirty' if dirty else f'returns a {others[0]}'}, "
            f"which cannot be saved. Return new tensors or None, and keep other values on the context; or use "
            f'policy="full" for this block.'
        )


def _kernel(first: torch.Tensor, others: list[torch.Tensor], keys: int, draws: bool, handle: int) -> list[torch.Tensor]:
    # A schema has no type for other Python values: they wait under the handle. The tensors are arguments so that the
    # dispatcher sees their device, and reports their shapes.
    call: _KernelCall = process.opaque_calls[handle]
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
    """Make the forward of an autograd.Function savable, in place: also for code that has captured its `apply`.

    Outside checkpointed regions the forward runs as before. torch counts the FLOPs of the forward; the backward stays
    Python that launches a kernel. Under torch.compile the Function is traced as it is: its call is recomputed, and a
    warning says so.

    Args:
        function: its outputs are tensors or None.
        name: the name of the op, unique; by default the name of the class.
        backend, layout, max_kv, dropout, flops: as in fastac.AttentionOp, by the names of the forward's parameters.
        key: the parameter that holds the keys; by default the second tensor that it is called with.

    Returns:
        The op, `fastac_opaque::<name>`.

    Raises:
        FastacError: a Function with `setup_context`, an argument that its forward does not have, a name that another
            Function has; when it is called in a region, `mark_dirty` and outputs that are not tensors.

    Example:
        >>> fastac.make_visible(MyAttention, key="k", layout="bhsd", dropout=None)
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise FastacError(f"make_visible: expected a subclass of torch.autograd.Function, got {function!r}")
    options: dict[str, Any] = {"key": key, "layout": layout, "max_kv": max_kv, "dropout": dropout, "flops": flops}
    row = OpaqueFunction(backend=backend, module=function.__module__, name=name, **options)
    for op_name, (visible, visible_row) in process.visible.items():
        if visible is function and name in ("", op_name) and visible_row == dataclasses.replace(row, name=op_name):
            return _op(op_name)
        if visible is function:
            raise FastacError(
                f"make_visible: {function.__qualname__} is visible already, as {op_name!r}, with other options. "
                f"Functions of known libraries are made visible by fastac.enable: call make_visible before it."
            )
    if not name:
        name = default = re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
        while name in process.visible:  # the class was defined again, in a notebook or a local scope
            name = f"{default}_{next(_numbers)}"
        row = dataclasses.replace(row, name=name)
    original = function.forward
    parameters = list(inspect.signature(original).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    _check(function, row, defaults)
    _library.define(f"{name}(Tensor first, Tensor[] others, int keys, bool draws, int handle) -> Tensor[]")
    _library.impl(name, _kernel, "CompositeExplicitAutograd")
    op = _op(name)

    def formula(*args: Any, out_val: Any) -> int:
        call: _KernelCall = process.opaque_calls[args[-1]]
        named = named_arguments(defaults, call.args)
        return products(row, named, out_val[0], _key_of(row, named, call.tensors)).forward()

    add_formula(op, formula)
    registry.register(
        AttentionOp(backend=backend, namespace=OPAQUE_NAMESPACE, name=name, key="first", max_kv="keys", dropout="draws")
    )

    # With the signature of the original: a subclass may inherit it, and make_visible reads that.
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _warn_compiled(name)
            return original(ctx, *args, **kwargs)
        tensors = list(tensors_in(args))
        # The forward may also be called without `apply`: by another Function, as a helper, with a context of any class;
        # or by a subclass that is visible itself, with the context of a call that is on its way.
        by_hand = kwargs or not isinstance(ctx, torch.autograd.function.FunctionCtx)
        if by_hand or "set_materialize_grads" in vars(ctx) or not tensors or not _is_watched(tensors):
            return original(ctx, *args, **kwargs)
        named = named_arguments(defaults, args)
        keys = number_of_keys(row, named.get(max_kv or ""), _key_of(row, named, tensors), function.__qualname__)
        draws = dropout == ALWAYS or (dropout is not None and may_draw(named[dropout]))
        handle = next(_numbers)
        call = process.opaque_calls[handle] = _KernelCall(original, ctx, args, tensors)
        try:
            flat = op(tensors[0], tensors[1:], keys, draws, handle)
        finally:
            del process.opaque_calls[handle]
        assert call.companion is not None
        return call.companion.give(ctx, flat, tensors)

    process.visible[name] = function, row
    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    logger.info("%s.%s is visible as %s::%s", function.__module__, function.__qualname__, OPAQUE_NAMESPACE, name)
    return op


def _check(function: type[torch.autograd.Function], row: OpaqueFunction, parameters: Mapping[str, Any]) -> None:
    registry.check_row(row, "make_visible")
    if function.setup_context is not torch.autograd.Function.setup_context:
        raise FastacError(
            f"make_visible: {function.__qualname__} has a setup_context, so its forward does not see the context. "
            f"Write both as one forward(ctx, ...), or register its kernel as a torch.library.custom_op."
        )
    if row.name in process.visible:
        raise FastacError(
            f"make_visible: {process.visible[row.name][0].__qualname__} has the name {row.name!r}. Give another name."
        )
    registry.check_named(row, parameters, f"make_visible: the forward of {function.__qualname__}")


def _op(name: str) -> torch._ops.OpOverload:
    op: torch._ops.OpOverload = getattr(_ops, name).default
    return op


def _key_of(row: OpaqueFunction, named: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The key tensor of a call: as the row names it, or the second tensor of more than two dimensions."""
    if row.key and named[row.key] is not None:
        return named[row.key]  # type: ignore[no-any-return]
    large = [tensor for tensor in tensors if tensor.dim() > 2] or tensors[:1]
    return large[min(1, len(large) - 1)]


def _is_watched(tensors: Sequence[Any]) -> bool:
    """Whether the call may be saved or counted. If not, and in traces, the forward just runs."""
    # The op has no rule for tensors without data, or for subclasses (DTensor).
    if torch_private.in_proxy_trace() or any(map(torch_private.is_fake, tensors)):
        return False
    if any(map(is_traceable_wrapper_subclass, tensors)):
        return False
    listening = thread.scope is not None or bool(process.listeners) or bool(process.replayed_calls)
    return listening or torch_private.in_dispatch_mode()


@torch_private.constant_under_dynamo
def _warn_compiled(name: str) -> None:
    where = "is in a compiled graph, where its kernel has no op: a checkpointed region there recomputes it"
    advice = "Register the kernel as a torch.library.custom_op to have it saved."
    logger.warning("%s::%s %s. %s", OPAQUE_NAMESPACE, name, where, advice)


def is_visible(function: type) -> bool:
    """Whether make_visible was called for an autograd.Function."""
    return any(visible is function for visible, _ in process.visible.values())


# Functions of known libraries


def know(*functions: OpaqueFunction) -> None:
    """Add Functions that are made visible as soon as their module is loaded and a model is enabled.

    Raises FastacError for a malformed row.
    """
    for function in functions:
        registry.check_row(function, "OpaqueFunction")
    process.known_functions.extend(function for function in functions if function not in process.known_functions)
    process.modules_of_functions = None


def missing(known: OpaqueFunction) -> str:
    """A sentence on a Function that is missing in its module; "" if it is there, or if the module is not loaded."""
    modules = {name: module for name, module in sys.modules.copy().items() if re.fullmatch(known.module, name)}
    if not modules or any(known.name in getattr(module, "__dict__", {}) for module in modules.values()):
        return ""
    return f"The row for the Function {known.name} matches none: {', '.join(modules)} has no {known.name}"


def make_known_visible() -> None:
    """Make each known Function visible whose module is loaded. Cheap while no further module is loaded.

    A Function that cannot be made visible stays as it is, and a warning says why: a model that uses it is refused.
    """
    if (loaded := interception.loaded_modules()) == process.modules_of_functions:
        return
    settled = process.settled_functions
    with process.lock:
        for name, module in sys.modules.copy().items():  # other threads import meanwhile; copy() is atomic
            for known in process.known_functions:
                # From its __dict__: getattr would make a lazy module load it.
                function = getattr(module, "__dict__", {}).get(known.name)
                if function is None or (known, name) in settled or not re.fullmatch(known.module, name):
                    continue
                settled.add((known, name))
                if is_visible(function):  # the user has called make_visible, with other options
                    continue
                options = {field: value for field, value in vars(known).items() if field not in ("module", "name")}
                try:
                    make_visible(function, **options)
                except FastacError as error:
                    logger.warning("%s.%s cannot be saved: %s", name, known.name, error)
        process.modules_of_functions = loaded
