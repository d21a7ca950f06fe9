"""What is private in torch and fastac uses, in one place.

Seen in torch 2.13. Each name is looked up at import; one that went away is an ImportError that names it and the torch
version, and `tests/test_torch_internals.py` fails. What fastac uses of the dispatcher stands in `dispatcher_internals`,
of the compiler in `compile.torch_private`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._C._dynamo.eval_frame as _eval_frame
import torch.utils.checkpoint
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from fastac import probing

_REQUIRED = (
    "_C.DispatchKey.ADInplaceOrView",
    "_C._SetExcludeDispatchKeyGuard",
    "_C._FunctionBase.dirty_tensors",
    "_C._FunctionBase.non_differentiable",
    "_C._FunctionBase.to_save",
    "_C._TorchDispatchModeKey.PROXY",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._DisableTorchDispatch",
    "_C._current_graph_task_id",
    "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._get_dispatch_mode",
    "_C._has_storage",
    "_C._len_torch_dispatch_stack",
    "_guards.TracingContext.try_get",
    "_C._autograd._get_sequence_nr",
    "_C._autograd._top_saved_tensors_default_hooks",
    "compiler._is_non_strict_tracing",
    "utils.checkpoint._StopRecomputationError",
    "utils.checkpoint._checkpoint_debug_enabled",
)

probing.require(_REQUIRED)

_SKIP_FRAME = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)

COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node that stands for code torch.compile made."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation on fake tensors raises whose output depends on their values."""

StopRecompute = torch.utils.checkpoint._StopRecomputationError
"""How torch ends a recompute as soon as autograd has what it needs."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def run_eagerly(modules: Iterable[types.ModuleType]) -> None:
    """Keep dynamo from compiling frames of these modules, which it meets after graph breaks and under the dispatcher.

    Unlike `torch.compiler.disable` this costs nothing per call, and a traced caller still inlines the functions.
    """
    for module in modules:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    if code.co_filename == module.__file__:  # not what a decorator of another module wraps around
                        _eval_frame.set_code_exec_strategy(code, _SKIP_FRAME)


def _codes(value: object) -> Iterator[types.CodeType]:
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(member)
    elif isinstance(value, types.CodeType):
        yield value
        for constant in value.co_consts:
            yield from _codes(constant)
    elif value is not None:
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        yield from _codes(getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None)


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return running_backward() != -1


def innermost_checkpoint() -> object:
    """What tells the torch.utils.checkpoint that packs here what is saved from others; None where none does."""
    return _packs("_checkpoint_hook")


def in_recompute() -> bool:
    """Whether what runs in this thread is what torch.utils.checkpoint runs again, in the middle of a backward."""
    return _packs("_recomputation_hook") is not None


def _packs(name: str) -> object:
    """What packs here what is saved, where it is one of torch.utils.checkpoint's hooks, by its class's name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and name in hooks[0].__qualname__ else None


def running_backward() -> int:
    """What tells the backward that is running in this thread from others; -1 where none is."""
    return torch._C._current_graph_task_id()


def in_proxy_trace() -> bool:
    """Whether this thread is recording operations into a graph: AOT, make_fx, export."""
    return proxy_mode() is not None


def proxy_mode() -> Any:
    """The mode that records operations of this thread into a graph; None where none does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def in_compile_trace() -> bool:
    """Whether dynamo or AOT is tracing in this thread (`torch.compiler.is_compiling()` is process-wide)."""
    return TracingContext.try_get() is not None


def in_other_trace() -> bool:
    """Whether a trace that is neither dynamo nor AOT is on: `make_fx`, and what is built around it."""
    return in_proxy_trace() and (torch.compiler._is_non_strict_tracing() or not in_compile_trace())


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data, as tracing and planning use them."""
    return isinstance(value, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data."""
    return FakeTensorMode()


def without_modes() -> Any:
    """A context in which no TorchDispatchMode sees what is computed."""
    return torch._C._DisableTorchDispatch()


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether only the shape of a tensor is known, as in a trace or on the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta


def has_stand_ins(args: Sequence[object]) -> bool:
    """Whether an attention op is called to learn about its outputs rather than to compute them."""
    return (bool(args) and type(args[0]) is FakeTensor) or TracingContext.try_get() is not None


def aliases(values: Sequence[Any]) -> tuple[Any, ...]:
    """Detached aliases that share the version counters, so that an in-place change of either is noticed.

    Below autograd the ADInplaceOrView key is excluded, and a plain `detach()` would get a counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tuple([value.detach() if isinstance(value, torch.Tensor) else value for value in values])


def emptied(values: Sequence[Any]) -> tuple[Any, ...]:
    """Detached aliases, made empty: what still shares the version counter and holds no memory.

    Setting `.data` gives a tensor other memory, and keeps the version counter that it shares with the others.
    """
    kept = aliases(values)
    for value in kept:
        if isinstance(value, torch.Tensor):
            value.data = value.new_empty(0)
    return kept


def clones(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies with the same strides, also of a part of a larger buffer, where a plain `clone()` would be contiguous."""
    return tuple([_clone(value) if isinstance(value, torch.Tensor) else value for value in values])


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    if copy.stride() != tensor.stride() and 0 not in tensor.stride():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy


def versions(values: Sequence[Any]) -> list[int | None]:
    """How often each tensor was changed in place; None for an inference tensor, which does not count."""
    return [None if value.is_inference() else value._version for value in values if isinstance(value, torch.Tensor)]


def memory(tensor: torch.Tensor) -> object:
    """What tells the memory of a tensor from others'; views share it. Of a tensor without one, itself."""
    try:
        return StorageWeakRef(tensor.untyped_storage()).cdata
    except NotImplementedError:  # sparse tensors
        return id(tensor), "tensor"


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own (wrapper subclasses have none)."""
    return torch._C._has_storage(tensor)


def given_to(context: Any) -> tuple[tuple[Any, ...], ...]:
    """What an autograd.Function's forward has given to save_for_backward, mark_non_differentiable and mark_dirty."""
    return tuple(tuple(given or ()) for given in (context.to_save, context.non_differentiable, context.dirty_tensors))


def function_of(node: Any) -> type | None:
    """The autograd.Function that a node of the graph belongs to; None for a node of torch's own."""
    return getattr(node, "_forward_cls", None)


def newest_node() -> int:
    """The sequence number of the autograd node that this thread made last.

    In an attention call it is the call's own, or that of the autograd.Function whose forward makes the call: both are
    made before the kernel runs.
    """
    return torch._C._autograd._get_sequence_nr() - 1


def sequence_number(node: Any) -> int:
    """The place of an autograd node among those that its thread made."""
    return int(node._sequence_nr())


def input_shapes(node: Any) -> list[torch.Size | None]:
    """Shapes of the inputs of an autograd node, None for one that needs no gradient or is no tensor."""
    return [None if fn is None else fn._input_metadata[place].shape for fn, place in node.next_functions]


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is open in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def checkpoint_debug_enabled() -> bool:
    """Whether `torch.utils.checkpoint.set_checkpoint_debug_enabled(True)` is on."""
    return bool(torch.utils.checkpoint._checkpoint_debug_enabled)
