"""make_visible: gives the kernel inside an autograd.Function a dispatcher op, so that its output can be saved.

A kernel that Triton, CuTe or pybind launches is seen by nobody: autograd knows the Function, the dispatcher nothing.
`make_visible` puts its forward inside an op, in place. The op returns the outputs and whatever the forward saved for
backward beyond its inputs; on replay both come from the tape and the kernel does not run.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastac import flops, interception, packing, registry, torch_internals
from fastac.errors import FastacError
from fastac.registry import ResolvedOp
from fastac.rows import ALWAYS, KEYS_DIMENSION, AttentionOp, OpaqueFunction, check_offsets
from fastac.scopes import execution_counters, thread

logger = logging.getLogger("fastac")

NAMESPACE = "fastac_opaque"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_visible: dict[str, tuple[type[torch.autograd.Function], tuple[Any, ...]]] = {}
_known: list[OpaqueFunction] = []
_settled: set[tuple[OpaqueFunction, str]] = set()
_looked_at: object = None
_looking = threading.RLock()
_handles = itertools.count()
_calls: dict[int, _Call] = {}
_states: weakref.WeakValueDictionary[int, packing.State] = weakref.WeakValueDictionary()
"""What a forward that really ran set on its context, as long as something that was kept of the call lives."""


class _Call(NamedTuple):
    """A call on its way through the dispatcher, which takes tensors and numbers only."""

    original: Callable[..., Any]
    context: Any
    args: tuple[Any, ...]
    tensors: list[torch.Tensor]


def make_visible(
    function: type[torch.autograd.Function],
    *,
    name: str = "",
    backend: str = "opaque",
    key: str = "",
    layout: str = "bshd",
    max_kv: str | None = None,
    dropout: str | None = ALWAYS,
    offsets: tuple[str, ...] = (),
    blocks: tuple[str, ...] = (),
) -> torch._ops.OpOverload:
    """Make the forward of an autograd.Function savable, in place: also where its `apply` was captured before.

    function: its outputs are tensors or None. name: of the op, unique; by default that of the class.
    key, layout, max_kv, dropout, offsets, blocks: as in fastac.AttentionOp, by the names of the forward's parameters.
    key: the second tensor it is called with, where it is not given.
    Returns the op, `fastac_opaque::<name>`. Outside checkpointed regions the forward runs as before. torch counts the
    FLOPs of the forward; the backward stays Python that launches a kernel, which no FlopCounterMode sees. Under
    torch.compile the Function is traced as it is, so its call is recomputed, and a warning says so.
    Raises FastacError for a Function with `setup_context`, for an argument its forward does not have, and for a name
    that another Function has; when it is called in a region, for `mark_dirty` and for outputs that are no tensors.
    """
    options = (key, layout, max_kv, dropout, offsets, blocks)
    for given, (visible, options_given) in _visible.items():
        if visible is function and name in ("", given) and options == options_given:
            return _op(given)
        if visible is function:
            raise FastacError(
                f"make_visible: {function.__qualname__} is visible already, as {given!r}, with (key, layout, max_kv, "
                f"dropout, offsets, blocks) = {options_given}. fastac.enable makes the Functions of known libraries "
                f"visible: to have your own options count, make it visible before."
            )
    if not name and isinstance(function, type):
        name = own = re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
        while name in _visible:  # defined again, in a notebook or a local scope
            name = f"{own}_{next(_handles)}"
    original = _forward_of(function, name)
    parameters = dict(list(inspect.signature(original).parameters.items())[1:])
    check_offsets(offsets, f"make_visible: offsets of {function.__qualname__}")
    for parameter in filter(None, (key, max_kv, None if dropout == ALWAYS else dropout, *offsets, *blocks)):
        if parameter not in parameters:
            raise FastacError(
                f"make_visible: the forward of {function.__qualname__} has no argument {parameter!r}. "
                f"It has {', '.join(parameters)}."
            )
    if layout not in KEYS_DIMENSION:
        raise FastacError(f"make_visible: layout {layout!r} is none of {', '.join(KEYS_DIMENSION)}")

    if not hasattr(getattr(torch.ops, NAMESPACE), name):  # else it was not registered, when this was tried before
        _library.define(f"{name}(Tensor first, Tensor[] others, int keys, bool draws, int handle) -> Tensor[]")
        _library.impl(name, _kernel, "CompositeExplicitAutograd")
    op = _op(name)
    flops.add(op, lambda *args, out_val: products(_calls[args[-1]], args[2], out_val[0]).forward())
    registry.register(
        AttentionOp(backend=backend, namespace=NAMESPACE, name=name, key="first", max_kv="keys", dropout="draws")
    )

    places = {parameter: place for place, parameter in enumerate(parameters)}

    def value_of(parameter: str, args: tuple[Any, ...]) -> Any:
        place = places[parameter]
        return args[place] if place < len(args) else parameters[parameter].default

    def key_of(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> torch.Tensor:
        if key and (given := value_of(key, args)) is not None:
            return given  # type: ignore[no-any-return]
        large = [tensor for tensor in tensors if tensor.dim() > 2]
        return large[min(1, len(large) - 1)] if large else tensors[0]

    def products(call: _Call, keys: int, output: torch.Tensor) -> flops.Products:
        named = [[value_of(name, call.args) for name in names] for names in (offsets, blocks)]
        tensor = key_of(call.args, call.tensors)
        return flops.Products(output=output, key=tensor, keys=keys, offsets=named[0], blocks=named[1])

    def keys_of(args: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
        given = value_of(max_kv, args) if max_kv else None
        if isinstance(given, int):  # a tensor would have to be waited for
            return given
        tensor = key_of(args, tensors)
        if tensor.dim() < -KEYS_DIMENSION[layout]:
            raise FastacError(
                f"{function.__qualname__} was made visible with layout={layout!r}, and its key tensor has the shape "
                f"{tuple(tensor.shape)}. Name the key and its layout: fastac.make_visible(..., key=..., layout=...)."
            )
        return int(tensor.shape[KEYS_DIMENSION[layout]])

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _tell_compiled(name)
            return original(ctx, *args, **kwargs)
        tensors = packing.tensors_in(args)
        # Not by `apply`: another Function that calls this forward as a helper may pass what it likes.
        by_hand = bool(kwargs) or not isinstance(ctx, torch.autograd.function.FunctionCtx)
        if by_hand or not tensors or not _is_watched(tensors):
            return original(ctx, *args, **kwargs)
        draws = dropout == ALWAYS or (dropout is not None and bool(value_of(dropout, args)))
        handle = next(_handles)
        _calls[handle] = _Call(original, ctx, args, tensors)
        try:
            flat = op(tensors[0], tensors[1:], keys_of(args, tensors), draws, handle)
        finally:
            del _calls[handle]
        numbers = flat[-1].tolist()
        state = _states.get(numbers[0])
        if state is not None and numbers[0] == handle:
            _hold(state)
        elif state is not None:
            state.put_on(ctx)
        return packing.unpack(ctx, flat, numbers, tensors)

    _visible[name] = function, options
    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    logger.info("%s.%s is visible as %s::%s", function.__module__, function.__qualname__, NAMESPACE, name)
    return op


def is_opaque(resolved: ResolvedOp) -> bool:
    """Whether an op is one that make_visible made."""
    return resolved.qualified_name.startswith(f"{NAMESPACE}::")


def is_visible(function: type) -> bool:
    """Whether make_visible was called for an autograd.Function."""
    return any(visible is function for visible, _ in _visible.values())


def extra_bytes(resolved: ResolvedOp, kept: Sequence[Any]) -> int:
    """Bytes, among what a call kept, of tensors that are none of its outputs: what its backward needs besides."""
    extra = packing.beside_outputs(kept) if is_opaque(resolved) and kept else ()
    return sum(tensor.untyped_storage().nbytes() for tensor in extra)


def know(*functions: OpaqueFunction) -> None:
    """Add Functions that are made visible as soon as their module is loaded and a model is enabled."""
    global _looked_at
    _known.extend(functions)
    _looked_at = None


def known_backends() -> set[str]:
    """The backends of the Functions that are known, whether their modules are loaded or not."""
    return {known.backend for known in _known}


def make_known_visible() -> list[str]:
    """Make every known Function visible whose module is loaded; names of those that are new. Cheap when none is.

    One that can not be made visible stays as it is, and a warning says why: its backend is refused where it is used.
    """
    global _looked_at
    if (loaded := interception.loaded_modules()) == _looked_at:
        return []
    made: list[str] = []
    with _looking:
        complete = True
        for module_name, module in sys.modules.copy().items():  # other threads import meanwhile; copy() is atomic
            for known in _known:
                if (known, module_name) not in _settled and re.fullmatch(known.module, module_name):
                    complete = _make_visible(known, module_name, module, made) and complete
        _looked_at = loaded if complete else None
    return made


def _make_visible(known: OpaqueFunction, module_name: str, module: Any, made: list[str]) -> bool:
    function = getattr(module, known.name, None)
    if module is None:
        return True  # Python's way to forbid an import
    if function is None and getattr(getattr(module, "__spec__", None), "_initializing", False):
        return False  # still being imported
    _settled.add((known, module_name))
    if function is None:
        logger.warning("%s has no %s, which fastac was told to make visible", module_name, known.name)
        return True
    if is_visible(function):
        return True  # by the user, whose options count
    try:
        options = {name: value for name, value in vars(known).items() if name not in ("module", "name")}
        made.append(str(make_visible(function, **options)))
    except FastacError as error:
        logger.warning("%s.%s can not be saved: %s", module_name, known.name, error)
    return True


interception.before_installation.append(make_known_visible)


def _forward_of(function: Any, name: str) -> Callable[..., Any]:
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise FastacError(f"make_visible: expected a subclass of torch.autograd.Function, got {function!r}")
    if function.setup_context is not torch.autograd.Function.setup_context:
        raise FastacError(
            f"make_visible: {function.__qualname__} has a setup_context, which gets at the context apart from the "
            f"forward. Write both as one forward(ctx, ...), or register its kernel as a torch.library.custom_op."
        )
    if name in _visible:
        raise FastacError(
            f"make_visible: the name {name!r} is taken by {_visible[name][0].__qualname__}. Give another."
        )
    if not name.isidentifier():
        raise FastacError(f"make_visible: {name!r} is no name for an op. Use letters, digits and underscores.")
    return function.forward


def _op(name: str) -> torch._ops.OpOverload:
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def _is_watched(tensors: Sequence[Any]) -> bool:
    """Whether somebody is there who saves or counts the call. Elsewhere, and in traces, the forward just runs."""
    if torch_internals.in_proxy_trace():
        return False
    for tensor in tensors:
        if torch_internals.is_fake(tensor) or is_traceable_wrapper_subclass(tensor):
            return False  # a stand-in, or one such as DTensor, which an op must be taught
    listening = thread.scope is not None or bool(interception.watchers) or bool(execution_counters)
    return listening or torch_internals.in_dispatch_mode()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while dynamo traces the call, once per graph
def _tell_compiled(name: str) -> None:
    logger.warning(
        "%s::%s is in a compiled graph, where its kernel has no op: a checkpointed region there recomputes it. "
        "Register the kernel as a torch.library.custom_op to have it saved.",
        NAMESPACE,
        name,
    )


def _hold(state: packing.State) -> None:
    """Keep it as long as the tapes that may replay the call: a gradient taken inside the region frees the context."""
    scope = thread.scope
    while scope is not None:
        scope.tape.companions.append(state)
        scope = scope.outer


def _kernel(first: torch.Tensor, others: list[torch.Tensor], keys: int, draws: bool, handle: int) -> list[torch.Tensor]:
    """Run the forward itself. Returns its outputs, what it saved beyond its inputs, and how to find both again."""
    call = _calls[handle]
    state = _states[handle] = packing.State()
    outputs = state.run(call.original, call.context, call.args)
    packed = packing.pack(call.context, outputs, call.tensors, handle)
    # torch's selective checkpointing keeps the memory of outputs; the tape may copy them, see _hold.
    packed[-1].untyped_storage().fastac_state = state  # type: ignore[attr-defined]
    return packed
