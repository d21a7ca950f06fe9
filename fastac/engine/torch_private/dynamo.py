"""Private names of torch's tracers: dynamo, AOT, make_fx, export, and the dispatch modes by which they record ops."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastac.engine.torch_private.tensors import is_fake

_Function = TypeVar("_Function", bound=Callable[..., Any])

# torch.compiler.disable wraps a function: every call would pay for the wrapper. dynamo's own marks on code objects
# (pytorch#148020) cost nothing. They are set before dynamo meets the code: a mark that it recorded for one compiled
# function would win over a later one (pytorch#196520).
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
    """The code of a function, a method, a property or a class, with the functions defined inside it."""
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


def without_dynamo(function: _Function) -> _Function:
    """Keep dynamo from compiling a function and all that it calls, as torch.compiler.disable does, at no cost per call.

    A block that is compiled itself (`block.compile()`) runs its compiled code. Compiled autograd calls the function.
    """
    _WITHOUT_DYNAMO.add(function.__code__)
    # The mark on the code is for frames that Python calls; this one is for callers that dynamo traces.
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
    # torch.fx.experimental.proxy_tensor.get_proxy_mode, without the import of the tracer.
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def stance() -> str:
    """The stance of torch.compiler.set_stance. "default" before dynamo is loaded."""
    # torch has no function that reads it. Importing dynamo to look would take a second.
    module = sys.modules.get("torch._dynamo.eval_frame")
    return str(getattr(getattr(module, "_stance", None), "stance", "default"))


def memory_budget() -> float:
    """The share of activations that AOT's partitioner may save of what is traced now; 1 before it is loaded."""
    budget: float = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    # torch.autograd.graph.region_activation_memory_budget (since 2.13) annotates what is traced inside it.
    annotations: dict[str, float] = torch.fx.traceback.current_meta.get("custom") or {}
    return annotations.get("_region_activation_memory_budget", budget)


# Absent before torch 2.12. torch's own checkpoint asks it too, since make_fx traces may be nested (pytorch#179048).
_is_non_strict: Callable[[], bool] = getattr(torch.compiler, "_is_non_strict_tracing", lambda: False)


def in_other_trace() -> bool:
    """Whether a trace that is neither dynamo nor AOT is on: `make_fx`, and tools that use it."""
    # Not torch.compiler.is_compiling(), which is of the process: dynamo or AOT may trace in another thread. Only dynamo
    # and AOT set a TracingContext, and it is of the thread.
    return in_proxy_trace() and (TracingContext.try_get() is None or _is_non_strict())


def in_symbolic_trace(values: Any) -> bool:
    """Whether torch.fx.symbolic_trace calls a function with these values."""
    # The flag is of the process. A Proxy among the values says that this thread traces.
    is_traced = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    return is_traced and any(isinstance(value, torch.fx.Proxy) for value in tree_leaves(values))


def in_export() -> bool:
    """Whether torch.export or torch.jit.trace traces."""
    # The public torch.compiler.is_exporting() was True in every trace of dynamo before torch 2.12 (pytorch#176347,
    # mended by pytorch#176499): checkpoints in a compiled model were silently dropped. Use it once 2.11 is not
    # supported.
    return torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None


def is_traced(values: Iterable[object]) -> bool:
    """Whether a call with these values is recorded or planned, not run: export, AOT, make_fx, or fake tensors."""
    return in_export() or in_proxy_trace() or any(map(is_fake, values))


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is open in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_modes() -> Any:
    """A context in which no TorchDispatchMode sees ops."""
    return torch._C._DisableTorchDispatch()


def no_modes() -> Any:
    """A context without the TorchDispatchModes that are on. Modes that are entered inside it see ops."""
    return _disable_current_modes()


class _Compilations:
    """Counts dynamo's compilations, in the process and in each thread.

    A reset of dynamo removes every callback, and dynamo numbers compilations from 0/0 again.
    """

    def __init__(self) -> None:
        self.count = 0  # compilations and resets
        self.resets = 0
        self.here = threading.local()

    def so_far(self) -> int:
        """The count; 0 without dynamo. Begins to count, if it does not yet. Cheap: called in every region."""
        if "torch._dynamo.callback" not in sys.modules:
            return 0
        # `on_compile_start` (pytorch#120764) appends to this list, too. But only the list shows whether a reset has
        # emptied it. Once there is a callback for resets (asked for in pytorch#194770), both can be registered once.
        callbacks: list[Any] = torch._dynamo.callback.callback_handler.start_callbacks
        if self._begin not in callbacks:
            callbacks.append(self._begin)
            self.count += 1
            self.resets += 1
        return self.count

    def _begin(self, _: Any) -> None:
        self.count += 1
        self.here.count = self.in_this_thread() + 1

    def in_this_thread(self) -> int:
        """Number of compilations that began in this thread."""
        return getattr(self.here, "count", 0)


compilations = _Compilations()


class CompiledCalls:
    """Counts, in the thread that opens it, how often compiled code runs or is compiled.

    The autograd graph does not show compiled code if no input requires grad.
    """

    _open: ClassVar[list[CompiledCalls]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    # The hook that was set before the first of these was opened: somebody else's.
    _previous: ClassVar[Any] = None

    def __enter__(self) -> CompiledCalls:
        self._thread = threading.get_ident()
        self._found_code = 0
        with self._lock:
            if not self._open:
                # torch has one such hook, for guard collectives (pytorch#156562), and no public way to see a cache hit.
                # It is on only while a region is observed: it costs a call of Python for every compiled call.
                previous: Any = _eval_frame.set_guard_complete_hook(self._found)
                # Our own hook may still be set: somebody set theirs while ours was, and restored ours after we closed.
                CompiledCalls._previous = None if previous is self._found else previous
            self._open.append(self)
        compilations.so_far()
        self._begun_before = compilations.in_this_thread()
        return self

    def __exit__(self, *exception: object) -> None:
        self.count = self._found_code + compilations.in_this_thread() - self._begun_before
        with self._lock:
            self._open.remove(self)
            if not self._open:
                _eval_frame.set_guard_complete_hook(CompiledCalls._previous)

    # Not a bound method: dynamo holds no reference to the hook while it calls it, and another thread may close us then.
    @staticmethod
    def _found(cache_hit: bool) -> bool:
        """Called when dynamo has looked for compiled code. Returns whether there is some."""
        if cache_hit:
            thread = threading.get_ident()
            for counter in list(CompiledCalls._open):
                counter._found_code += counter._thread == thread
        previous = CompiledCalls._previous
        return cache_hit if previous is None else previous(cache_hit)
