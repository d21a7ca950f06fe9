"""Private names of torch that the engine uses: dispatcher, dynamo, tensors, autograd, checkpointing.

Seen in torch 2.9 to 2.15. They are looked up when fastac is first used, not at its import. One that is gone is an
ImportError that names it and the torch version. Private names of the compiler are in `fastac.compiled.torch_private`,
those of traces in `fastac.graph.torch_private`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

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
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only

from fastac.registry.torch_private import DEVICES, handles, is_of_torch, qualified_name
from fastac.registry.torch_private import has_kernel as has_kernel

SEEN_IN = "2.9 to 2.15"
"""Releases of torch that fastac was run with: docs/versions.md."""


def find(name: str) -> Any:
    """The object of a dotted name, relative to `torch`. Imports its module. Raises AttributeError if there is none."""
    return pkgutil.resolve_name(f"torch.{name}")


def missing(names: Iterable[str]) -> list[str]:
    """Those of some names, relative to `torch`, that this build of torch does not have."""
    absent = []
    for name in names:
        try:
            find(name)
        except AttributeError:
            absent.append(name)
    return absent


def require(names: Iterable[str], user: str = "fastac") -> None:
    """Raise ImportError if this build of torch lacks one of the names. user: who needs them, for the message."""
    if absent := missing(names):
        raise ImportError(
            f"{user} needs {', '.join('torch.' + name for name in absent)}, which torch {torch.__version__} does not "
            f"have. It was seen in torch {SEEN_IN}: install one of these, or a newer fastac."
        )


_REQUIRED = (
    "_C.DispatchKey.ADInplaceOrView",
    "_C.DispatchKey.BackendSelect",
    "_C._DisableTorchDispatch",
    "_C._FunctionBase.dirty_tensors",
    "_C._FunctionBase.non_differentiable",
    "_C._FunctionBase.to_save",
    "_C._AutoDispatchBelowADInplaceOrView",
    "_C._AutoDispatchBelowAutograd",
    "_C._ExcludeDispatchKeyGuard",
    "_C._ForceDispatchKeyGuard",
    "_C._SetExcludeDispatchKeyGuard",
    "_C._TorchDispatchModeKey.PROXY",
    "_C._autograd._get_sequence_nr",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._functorch.is_batchedtensor",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_kernel_for_dispatch_key_is_fallthrough",
    "_C._dispatch_keyset_full",
    "_C._dispatch_keyset_full_after",
    "_C._dispatch_tls_local_exclude_set",
    "_C._dispatch_tls_local_include_set",
    "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._get_dispatch_mode",
    "_C._has_storage",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_guards.TracingContext.try_get",
    "_library.custom_ops.OPDEFS",
    "Tensor._nested_tensor_size",
    "_ops.HigherOrderOperator.dispatch",
    "_ops.HigherOrderOperator.py_impl",
    "_ops._compute_keyset",
    "autograd._engine_run_backward",
    "autograd.forward_ad._current_level",
    "autograd.Variable._execution_engine.queue_callback",
    "compiler._is_exporting_flag",
    "utils.checkpoint._checkpoint_debug_enabled",
    "utils.checkpoint._enable_checkpoint_early_stop",
)

require(_REQUIRED)

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node of a compiled graph."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an op on fake tensors whose output depends on their values."""


# The dispatcher


_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
BELOW_BACKEND_SELECT = torch._C._dispatch_keyset_full_after(_BACKEND_SELECT)
"""Keys for redispatching a call to the kernel below BackendSelect, which runs with the GIL released."""


def at_backend_select(op: Any, function: Callable[..., Any]) -> None:
    """Make calls of a higher-order op call function(keyset, *args, **kwargs), as Library.impl does for other ops."""

    def called(*args: Any, **kwargs: Any) -> Any:
        keyset = torch._ops._compute_keyset(args, kwargs, op.non_fallthrough_keys)
        with torch.profiler.record_function(qualified_name(op)):  # as the dispatcher does for an op
            return function(keyset, *args, **kwargs)

    op.py_impl(_BACKEND_SELECT)(called)


def is_composite(qualified_name: str) -> bool:
    """Whether an op only calls other ops, which are dispatched in turn. Modes see it only under inference mode."""
    return has_kernel(qualified_name, "CompositeImplicitAutograd")


def is_custom_op(name: str) -> bool:
    """Whether torch.library.custom_op made an op. name: namespace::name."""
    return name in torch._library.custom_ops.OPDEFS


def call_under_mode(op: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call an op from a dispatch mode, so that its kernels see the dispatch keys that they see without the mode.

    Under a mode torch leaves out all keys above it: autograd, autocast, conjugation, counting in-place changes. Kernels
    are made of ops that may need them. So they are put back, except for those that a kernel of the op above the mode
    leaves out itself. Without an autograd kernel of the op, autograd differentiates what is inside.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return op(*args, **kwargs)
    name, is_torchs = qualified_name(op), is_of_torch(op)
    with enable_reentrant_dispatch():  # the keys as they were when the op was called
        excluded = torch._C._dispatch_tls_local_exclude_set()
    # Here, where those above the mode are left out.
    keyset = None if is_torchs else torch._ops._compute_keyset(args, kwargs, _ALL_KEYS)
    with contextlib.ExitStack() as below:
        below.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))
        if is_torchs or handles(name, "Autocast"):
            below.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
        if is_torchs or (has_kernel(name, "ADInplaceOrView") and not is_custom_op(name)):
            below.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
        elif handles(name, "Autograd"):
            below.enter_context(torch._C._AutoDispatchBelowAutograd())
        if keyset is None:
            return op(*args, **kwargs)  # it takes Python numbers in the place of tensors
        if not has_kernel(name, "BackendSelect"):
            keyset = keyset.remove(_BACKEND_SELECT)
        return op.redispatch(keyset, *args, **kwargs)


_ALL_KEYS = torch._C._dispatch_keyset_full()
_AUTOCAST = functools.reduce(
    operator.or_, [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}")) for device in DEVICES]
)


# Dynamo


_SKIP_FRAME = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
_SKIP_ALL = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def run_eagerly(modules: Iterable[types.ModuleType]) -> None:
    """Keep dynamo from compiling frames of these modules, which run after graph breaks and under the dispatcher.

    Unlike `torch.compiler.disable` this costs nothing per call, and a traced caller still inlines the functions.
    """
    for module in modules:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    # Not the wrapper of a decorator from another module.
                    if code.co_filename == module.__file__ and code not in _WITHOUT_DYNAMO:
                        _eval_frame.set_code_exec_strategy(code, _SKIP_FRAME)


def _codes(value: object) -> Iterator[types.CodeType]:
    if isinstance(value, type):
        for member in vars(value).values():
            if not isinstance(member, type):  # the class of an autograd.Function refers to that of its node, and back
                yield from _codes(member)
    elif isinstance(value, types.CodeType):
        yield value
        for constant in value.co_consts:
            yield from _codes(constant)
    elif value is not None:
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        yield from _codes(getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None)


_WITHOUT_DYNAMO: set[types.CodeType] = set()


def without_dynamo(function: Function) -> Function:
    """Keep dynamo from compiling a function and all that it calls, as torch.compiler.disable does, at no cost per call.

    A block that is compiled itself (`block.compile()`) runs its compiled code. Compiled autograd calls the function.
    """
    _WITHOUT_DYNAMO.add(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


def constant_under_dynamo(function: Callable[..., None]) -> Callable[..., None]:
    """Let dynamo run a function when it traces a call of it, once per graph, and not trace into it.

    torch.compiler.assume_constant_result does the same, and imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_proxy_trace() -> bool:
    """Whether this thread is recording operations into a graph: AOT, make_fx, export."""
    return proxy_mode() is not None


def proxy_mode() -> Any:
    """The mode that records operations of this thread into a graph, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def stance() -> str:
    """The stance of torch.compiler.set_stance. "default" before dynamo is loaded."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return str(getattr(getattr(module, "_stance", None), "stance", "default"))


def memory_budget() -> float:
    """The share of activations that AOT's partitioner may save; 1 before it is loaded."""
    return getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)


_is_non_strict: Callable[[], bool] = getattr(torch.compiler, "_is_non_strict_tracing", lambda: False)  # since 2.12


def in_other_trace() -> bool:
    """Whether a trace that is neither dynamo nor AOT is on: `make_fx`, and tools that use it."""
    # Not torch.compiler.is_compiling(), which is of the process: dynamo or AOT may trace in another thread.
    return in_proxy_trace() and (TracingContext.try_get() is None or _is_non_strict())


def in_export() -> bool:
    """Whether torch.export traces. Before 2.12 dynamo takes torch.compiler.is_exporting() for True in any trace."""
    return torch.compiler._is_exporting_flag


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is open in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_modes() -> Any:
    """A context in which no TorchDispatchMode sees ops."""
    return torch._C._DisableTorchDispatch()


# Tensors


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data, as tracing and planning use them."""
    return isinstance(value, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data."""
    return FakeTensorMode()


def empty_outputs(op: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Zeros in the shapes that an op would return, without running it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = op(*tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)
    return tree_map_only(
        torch.Tensor,
        lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).zero_(),
        outputs,
    )


def efficient_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The memory-efficient attention, which a plan simulates where a CPU has no kernel."""
    outputs = torch.ops.aten._scaled_dot_product_efficient_attention.default(*args, **kwargs)
    return outputs[0]  # type: ignore[no-any-return]


def softmax_to_fp32(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The softmax of numbers in fp16, in fp32 without a copy of them, as CUDA has it."""
    return torch.ops.aten._softmax.default(values, dim, True)  # type: ignore[no-any-return]


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no data, as in a trace or on the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta


def is_batched(value: object) -> bool:
    """Whether a value is a tensor of torch.vmap, also after that has ended."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def is_abstract(args: Sequence[object]) -> bool:
    """Whether an op is called to find out its outputs' metadata, not their values: by dynamo, AOT or a planner."""
    return (bool(args) and type(args[0]) is FakeTensor) or TracingContext.try_get() is not None


def aliases(values: Sequence[Any]) -> tuple[Any, ...]:
    """Detached aliases that share the version counters of tensors, so that in-place changes of either are noticed.

    Below autograd the ADInplaceOrView key is excluded: there a plain `detach()` would have a counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tuple([value.detach() if isinstance(value, torch.Tensor) else value for value in values])


def clones(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of tensors with the same strides, also of a part of a buffer, where `clone()` would be contiguous."""
    return tuple([clone(value, value.stride()) if isinstance(value, torch.Tensor) else value for value in values])


def clone(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides; with other ones if some are 0."""
    copy = tensor.clone()
    if copy.stride() != stride and 0 not in stride:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy


def versions(values: Sequence[Any]) -> list[int | None]:
    """Version of each tensor, which counts in-place changes; None for an inference tensor, which has none."""
    return [None if value.is_inference() else value._version for value in values if isinstance(value, torch.Tensor)]


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor; of a strided nested one, which has none, the shapes of its parts."""
    try:
        return tensor.shape
    except RuntimeError:
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


def memory(tensor: torch.Tensor) -> object:
    """A key for the storage of a tensor, which views share. Tensors without storage are keyed by identity."""
    try:
        return StorageWeakRef(tensor.untyped_storage()).cdata
    except NotImplementedError:  # sparse tensors
        return id(tensor), "tensor"


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor uses the storage of this one."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose version is that of another one, and of its views."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)  # keeps the counter
    return counter


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_plain(value: object) -> bool:
    """Whether storage, shape and strides describe a value completely: a tensor; no subclass, no weight, not sparse."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta or not has_storage(value):
        return False
    return not (value.is_inference() or value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage (wrapper subclasses have none)."""
    return torch._C._has_storage(tensor)


# Autograd and checkpointing


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on in this process: torch.func.jvp, or the user's dual_level."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return running_backward() != -1


def running_backward() -> int:
    """The id of the backward that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward of this thread. It drops callbacks of the engine."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def running_node() -> Any:
    """The autograd node whose backward runs in this thread, or None."""
    return torch._C._current_autograd_node()


def innermost_checkpoint() -> object:
    """A key for the checkpoint, torch's or fastac's, whose hook packs saved tensors in this thread now, or None."""
    return _packs("_checkpoint_hook")


def in_recompute() -> bool:
    """Whether this thread runs the recompute of a checkpoint, torch's or fastac's."""
    return _packs("_recomputation_hook") is not None


def saved_tensors_hooks() -> Any:
    """The saved-tensor hooks that are open in this thread, (pack, unpack); None for those of a checkpoint, or none."""
    return None if _packs("_checkpoint_hook", "_recomputation_hook") else _top_hooks()


def count_of_saved() -> int:
    """How many tensors autograd has saved in the forward of a region whose hook is the innermost; else 0."""
    return len(getattr(_packs("_checkpoint_hook"), "slots", ()))


def _packs(*names: str) -> object:
    """The pack hook that is open, if it is a checkpoint's: torch's and fastac's have these names."""
    pack, _ = _top_hooks() or (None, None)
    qualified = getattr(pack, "__qualname__", "")
    return pack if any(name in qualified for name in names) else None


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def as_checkpoint_hook(hook: Function, slots: Sequence[Any] = ()) -> Function:
    """Mark a function as the hook of a checkpoint, so that torch (2.14) does not take it for the user's.

    slots: of the region whose forward it packs.
    """
    hook._checkpoint_internal, hook._user_hooks = True, None  # type: ignore[attr-defined]
    hook.slots = slots  # type: ignore[attr-defined]
    return hook


_make_saved_tensor = getattr(torch._C._autograd, "_make_saved_tensor", None)  # since 2.13
_graph_exec_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


class _Inputs(torch.autograd.Function):
    """Saves tensors as autograd does, in a node that is part of no graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Never called."""
        raise AssertionError


def save(values: Iterable[Any]) -> Any:
    """Save values for `unpack`. Tensors are saved as autograd does: in-place changes are noticed."""
    if _make_saved_tensor is not None:
        return [_make_saved_tensor(one, is_output=False) if _is_saved(one) else one for one in values]
    values = list(values)
    anchor = torch.empty(0, requires_grad=True)
    output: Any = _Inputs.apply(anchor, *filter(_is_saved, values))  # type: ignore[no-untyped-call]
    return output, [_Inputs if _is_saved(one) else one for one in values]  # it alone holds the node


def _is_saved(value: Any) -> bool:
    """Whether autograd saves a value: a tensor that was not made in inference mode."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    # Before torch 2.13 a Function saves them, which takes no strided nested tensor.
    return _make_saved_tensor is not None or not value.is_nested or value.layout is not torch.strided


def unpack(saved: Any) -> list[Any]:
    """The values that `save` was given."""
    if _make_saved_tensor is not None:
        return [one.unpack() if isinstance(one, torch._C._autograd.SavedTensor) else one for one in saved]
    output, values = saved
    tensors = iter(output.grad_fn.saved_tensors)
    return [next(tensors) if one is _Inputs else one for one in values]


def register_hooks(saved: Any, values: Iterable[Any], pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Replace each saved tensor by pack(tensor), unless that is the tensor. values: as `save` was given them."""
    if _make_saved_tensor is None:
        output, _ = saved
        saved = output.grad_fn._raw_saved_tensors
    saved = (one for one in saved if isinstance(one, torch._C._autograd.SavedTensor))
    for value in filter(_is_saved, values):
        one, packed = next(saved), pack(value)
        if packed is not value:
            one.register_hooks(lambda _, packed=packed: packed, unpack)


def backward_key() -> Any:
    """The id of the running backward, or its GraphExecGroup, which several share; -1 if none runs."""
    return _graph_exec_group() or torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs in this thread ends, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def on_backward_error(function: Callable[[BaseException], None]) -> None:
    """Call a function with every error that a backward of this process raises. It stays: call this once.

    Kernels of a backward run below Python, where no hook of autograd's sees them fail.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            function(error)
            raise

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = watched  # type: ignore[attr-defined]


def early_stop(given: bool) -> bool:
    """Whether a recompute ends with the last tensor that is needed: as given, unless torch's switch is set."""
    return given if (switch := torch.utils.checkpoint._enable_checkpoint_early_stop) is None else switch


def in_debug_mode(given: bool) -> bool:
    """Whether torch.utils.checkpoint's debug mode is on: as given, unless torch's switch is set."""
    return given if (switch := torch.utils.checkpoint._checkpoint_debug_enabled) is None else switch


def profiler(**options: Any) -> torch.profiler.profile:
    """torch's profiler, which logs no start and stop: libkineto reads the level at the first profile of a process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(**options)


def profiled_events(profiled: torch.profiler.profile) -> list[Any]:
    """Events of a profiler, each before those inside it. profile.events(), which makes a tree of them, is slow."""
    events: Iterable[Any] = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))


def default_device() -> torch.device | None:
    """The device that torch.set_default_device or `with torch.device(...)` set in this thread, or None."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def given_to(context: Any) -> tuple[tuple[Any, ...], ...]:
    """Arguments that an autograd.Function gave to save_for_backward, mark_non_differentiable and mark_dirty."""
    return tuple(tuple(given or ()) for given in (context.to_save, context.non_differentiable, context.dirty_tensors))


def without_base(value: Any) -> Any:
    """A view made in the forward of a Function, without its base and graph; any other value as it is."""
    is_view = isinstance(value, torch.Tensor) and value._base is not None and value.grad_fn is None
    return value.data if is_view else value


def function_of(node: Any) -> type | None:
    """The autograd.Function that a node of the graph belongs to; None for a node of torch's own."""
    return getattr(node, "_forward_cls", None)


def newest_node() -> int:
    """The sequence number of the newest autograd node of this thread.

    In an attention call that is the node of the call, or of the autograd.Function whose forward makes the call: both
    are made before the kernel runs.
    """
    return torch._C._autograd._get_sequence_nr() - 1


def sequence_number(node: Any) -> int:
    """The place of an autograd node among those that its thread made."""
    return int(node._sequence_nr())


def input_shapes(node: Any) -> list[torch.Size | None]:
    """Shapes of the inputs of an autograd node; None for one that needs no gradient or is no tensor."""
    return [None if fn is None else fn._input_metadata[place].shape for fn, place in node.next_functions]
