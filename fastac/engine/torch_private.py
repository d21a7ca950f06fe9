"""What is private in torch and fastac's engine uses, in one place: dispatcher, autograd, checkpointing, fake tensors.

Seen in torch 2.9 to 2.15. Each name is looked up when fastac is first used, not at its import; one that went away is an
ImportError that names it and the torch version. What fastac uses of the compiler stands in
`fastac.compile.torch_private`, of traces in `fastac.graph.torch_private`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

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
from torch.utils._pytree import tree_map_only

SEEN_IN = "2.9 to 2.15"
"""Releases of torch that fastac was run with: docs/versions.md."""


def find(name: str) -> Any:
    """What a dotted name, relative to `torch`, stands for. Modules that nobody imported so far are imported.

    Raises AttributeError where torch has it not.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(["torch", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        return operator.attrgetter(".".join(parts[length:]))(module)
    return operator.attrgetter(name)(torch)


def missing(names: Iterable[str]) -> list[str]:
    """Names, relative to `torch`, that this build of torch does not have."""
    absent = []
    for name in names:
        try:
            find(name)
        except AttributeError:
            absent.append(name)
    return absent


def require(names: Iterable[str], user: str = "fastac") -> None:
    """Raise ImportError when this build of torch lacks one of the names."""
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
    "_C._SetExcludeDispatchKeyGuard",
    "_C._TorchDispatchModeKey.PROXY",
    "_C._autograd._get_sequence_nr",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_keyset_full_after",
    "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._get_dispatch_mode",
    "_C._has_storage",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_guards.TracingContext.try_get",
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

Op = torch._ops.OpOverload | torch._ops.HigherOrderOperator
Function = TypeVar("Function", bound=Callable[..., Any])
HigherOrderOperator = torch._ops.HigherOrderOperator

COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node that stands for code torch.compile made."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation on fake tensors raises whose output depends on their values."""


# The dispatcher


def is_op(value: object) -> bool:
    """Whether a value is an op: of the dispatcher, one overload, or a higher-order one."""
    return isinstance(value, (torch._ops.OpOverload, HigherOrderOperator))


@functools.cache
def is_of_torch(op: Any) -> bool:
    """Whether an op is one of torch's own, higher-order ones among them."""
    return not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prim", "prims")


def qualified_name(op: Op) -> str:
    """`namespace::name`, with `.overload` where it has one."""
    if isinstance(op, HigherOrderOperator):
        return f"{op.namespace}::{op.name()}"
    name: str = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
BELOW_BACKEND_SELECT = torch._C._dispatch_keyset_full_after(_BACKEND_SELECT)
"""Keys to redispatch a call to: the kernel below BackendSelect, which then runs with the GIL released."""


def op_names() -> list[str]:
    """`namespace::name.overload` of every op the dispatcher knows at this moment."""
    return torch._C._dispatch_get_all_op_names()


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own at a dispatch key, such as "CPU" or "BackendSelect"."""
    if qualified_name.startswith("higher_order::"):
        op = getattr(torch.ops.higher_order, qualified_name.removeprefix("higher_order::"))
        return getattr(torch._C.DispatchKey, dispatch_key) in op.py_kernels
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key)


class Argument(NamedTuple):
    """One argument of an op. written: the op may change the tensor; optional: it may be None."""

    name: str
    default: Any
    written: bool
    optional: bool


def arguments_of(op: Op) -> list[Argument]:
    """An op's arguments, from its schema; those of a higher-order op, which has none, from its signature."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        parameters = list(inspect.signature(op.__call__).parameters.values())
        return [Argument(parameter.name, parameter.default, False, False) for parameter in parameters]
    return [
        Argument(
            argument.name,
            argument.default_value,
            argument.alias_info is not None and argument.alias_info.is_write,
            isinstance(argument.type, torch.OptionalType),
        )
        for argument in op._schema.arguments
    ]


def returns_tensors(op: Op) -> bool:
    """Whether an op has a tensor among its outputs; a higher-order op does not say, and counts as having one."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return True
    return any("Tensor" in str(output.type) for output in op._schema.returns)


def redispatch_of(op: Op) -> Callable[..., Any]:
    """A function (keyset, *args, **kwargs) that calls an op's kernel for a keyset."""
    if not isinstance(op, torch._ops.HigherOrderOperator):
        return op.redispatch

    def redispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.dispatch(keyset.highestPriorityTypeId(), *args, **kwargs)

    return redispatch


def at_backend_select(op: torch._ops.HigherOrderOperator, function: Callable[..., Any]) -> None:
    """Let calls of a higher-order op pass by function(keyset, *args, **kwargs), as an implementation does for an op."""

    def called(*args: Any, **kwargs: Any) -> Any:
        keyset = torch._ops._compute_keyset(args, kwargs, op.non_fallthrough_keys)
        with torch.profiler.record_function(qualified_name(op)):  # as the dispatcher does for an op
            return function(keyset, *args, **kwargs)

    op.py_impl(_BACKEND_SELECT)(called)


def is_composite(qualified_name: str) -> bool:
    """Whether an op only calls other ops, which are dispatched in turn. Modes see it under inference mode alone."""
    return has_kernel(qualified_name, "CompositeImplicitAutograd")


# Dynamo


_SKIP_FRAME = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
_SKIP_ALL = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def run_eagerly(modules: Iterable[types.ModuleType]) -> None:
    """Keep dynamo from compiling frames of these modules, which it meets after graph breaks and under the dispatcher.

    Unlike `torch.compiler.disable` this costs nothing per call, and a traced caller still inlines the functions.
    """
    for module in modules:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    # Not what a decorator of another module wraps around.
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
    """Let dynamo compile nothing of what a function calls, as torch.compiler.disable does, at no cost per call.

    A block that is compiled itself (`block.compile()`) runs its compiled code. Compiled autograd calls the function.
    """
    _WITHOUT_DYNAMO.add(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


def constant_under_dynamo(function: Callable[..., None]) -> Callable[..., None]:
    """Let dynamo run a function while it traces a call of it, once per graph, and trace nothing of it.

    As torch.compiler.assume_constant_result does, which imports the compiler for it (a second).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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
    if not in_proxy_trace():
        return False
    non_strict = getattr(torch.compiler, "_is_non_strict_tracing", None)  # since 2.12
    return not in_compile_trace() or (non_strict is not None and non_strict())


def in_export() -> bool:
    """Whether torch.export traces. Before 2.12 dynamo takes torch.compiler.is_exporting() for True in any trace."""
    return torch.compiler._is_exporting_flag


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is open in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_modes() -> Any:
    """A context in which no TorchDispatchMode sees what is computed."""
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


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether only the shape of a tensor is known, as in a trace or on the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta


def is_abstract(args: Sequence[object]) -> bool:
    """Whether an op is called to learn about its outputs rather than to compute them: by dynamo, AOT or a planner."""
    return (bool(args) and type(args[0]) is FakeTensor) or TracingContext.try_get() is not None


def aliases(values: Sequence[Any]) -> tuple[Any, ...]:
    """Detached aliases that share the version counters, so that an in-place change of either is noticed.

    Below autograd the ADInplaceOrView key is excluded, and a plain `detach()` would get a counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tuple([value.detach() if isinstance(value, torch.Tensor) else value for value in values])


def clones(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies with the same strides, also of a part of a larger buffer, where a plain `clone()` would be contiguous."""
    return tuple([clone(value, value.stride()) if isinstance(value, torch.Tensor) else value for value in values])


def clone(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides; with strides of its own where some are 0."""
    copy = tensor.clone()
    if copy.stride() != stride and 0 not in stride:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
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


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, of whoever, has the storage of this one."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that counts changes in place of another one, and of its views."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)  # which leaves it its counter
    return counter


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor have been changed in place so often."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that its storage, shape and strides describe: no subclass, no weight, not sparse."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta or not has_storage(value):
        return False
    return not (value.is_inference() or value.is_conj() or value.is_neg() or value.is_quantized)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own (wrapper subclasses have none)."""
    return torch._C._has_storage(tensor)


# Autograd and checkpointing


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on in this process: torch.func.jvp, or a dual_level of the user's."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return running_backward() != -1


def running_backward() -> int:
    """What tells the backward that is running in this thread from others; -1 where none is."""
    return torch._C._current_graph_task_id()


def running_node() -> Any:
    """The autograd node whose backward is running in this thread; None where none is."""
    return torch._C._current_autograd_node()


def innermost_checkpoint() -> object:
    """What tells the checkpoint, torch's or fastac's, that packs here what is saved from others; None without one."""
    return _packs("_checkpoint_hook")


def in_recompute() -> bool:
    """Whether what runs in this thread is what a checkpoint, torch's or fastac's, runs again in backward."""
    return _packs("_recomputation_hook") is not None


def saved_tensors_hooks() -> Any:
    """The pair of functions that packs and unpacks here what is saved; None without one, or for a checkpoint's own."""
    return None if _packs("_checkpoint_hook", "_recomputation_hook") else _top_hooks()


def _packs(*names: str) -> object:
    """What packs here what is saved, where it is a checkpoint's hook: torch's and fastac's have these names."""
    hooks = _top_hooks()
    if hooks is None:
        return None
    qualified = getattr(hooks[0], "__qualname__", "")
    return next((hooks[0] for name in names if name in qualified), None)


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def as_checkpoint_hook(hook: Function) -> Function:
    """Mark a method as the hook of a checkpoint, so that torch (2.14) does not take it for the user's own."""
    hook._checkpoint_internal, hook._user_hooks = True, None  # type: ignore[attr-defined]
    return hook


_make_saved_tensor = getattr(torch._C._autograd, "_make_saved_tensor", None)  # since 2.13
_graph_exec_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


class _Inputs(torch.autograd.Function):
    """Saves tensors as autograd does, by a node that nothing leads to."""

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
    """Save values for `unpack`, the tensors among them as autograd does: changes in place are noticed."""
    if _make_saved_tensor is not None:
        return [_make_saved_tensor(one, is_output=False) if isinstance(one, torch.Tensor) else one for one in values]
    values = list(values)
    anchor = torch.empty(0, requires_grad=True)
    output: Any = _Inputs.apply(anchor, *[one for one in values if isinstance(one, torch.Tensor)])  # type: ignore[no-untyped-call]
    return output, [_Inputs if isinstance(one, torch.Tensor) else one for one in values]  # it alone holds the node


def unpack(saved: Any) -> list[Any]:
    """The values that `save` was given."""
    if _make_saved_tensor is not None:
        return [one.unpack() if isinstance(one, torch._C._autograd.SavedTensor) else one for one in saved]
    output, values = saved
    tensors = iter(output.grad_fn.saved_tensors)
    return [next(tensors) if one is _Inputs else one for one in values]


def register_hooks(saved: Any, values: Iterable[Any], pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Let hooks hold what `save` was given: pack(value) what it saved of a tensor, unless that is the tensor."""
    if _make_saved_tensor is None:
        output, _ = saved
        saved = output.grad_fn._raw_saved_tensors
    saved = (one for one in saved if isinstance(one, torch._C._autograd.SavedTensor))
    for value in values:
        if isinstance(value, torch.Tensor):
            one, packed = next(saved), pack(value)
            if packed is not value:
                one.register_hooks(lambda _, packed=packed: packed, unpack)


def backward_key() -> Any:
    """What tells the backward that is running from others, or the GraphExecGroup of several; -1 where none is."""
    return _graph_exec_group() or torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that is running in this thread has ended, unless it raises."""
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
    """Whether a recompute ends with the last tensor that is needed: as given, unless torch's switch says otherwise."""
    switch: bool | None = torch.utils.checkpoint._enable_checkpoint_early_stop
    return given if switch is None else switch


def in_debug_mode(given: bool) -> bool:
    """Whether torch.utils.checkpoint's debug mode is on: as given, unless torch's switch says otherwise."""
    switch: bool | None = torch.utils.checkpoint._checkpoint_debug_enabled
    return given if switch is None else switch


def profiled_events(profiled: torch.profiler.profile) -> list[Any]:
    """What the profiler saw, each event before those inside it. To make a tree of that, as events() does, is slow."""
    events: Iterable[Any] = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))


def default_device() -> torch.device | None:
    """The device of `with torch.device(...)` or torch.set_default_device in this thread; None without one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def given_to(context: Any) -> tuple[tuple[Any, ...], ...]:
    """What an autograd.Function's forward has given to save_for_backward, mark_non_differentiable and mark_dirty."""
    return tuple(tuple(given or ()) for given in (context.to_save, context.non_differentiable, context.dirty_tensors))


def without_base(value: Any) -> Any:
    """A view that the forward of a Function made, without what it is a view of and its graph; else the value itself."""
    is_view = isinstance(value, torch.Tensor) and value._base is not None and value.grad_fn is None
    return value.data if is_view else value


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
