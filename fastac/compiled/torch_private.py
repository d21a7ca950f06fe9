"""Private names of torch's compiler (dynamo, AOT, inductor) that fastac uses, in one place.

Seen in torch 2.9 to 2.15, unless a comment says otherwise. fastac does not import the compiler.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame
from torch._guards import CompileContext, TracingContext
from torch.fx import traceback

from fastac.engine.torch_private import COMPILED_NODE, function_of, proxy_mode

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
NESTED_REGION = torch.ops.higher_order.invoke_subgraph
"""What torch.compiler.nested_compile_region becomes in a graph."""


def compile_id() -> str | None:
    """The id, such as "0/1", of dynamo's compilation in this thread; None if there is none."""
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def compiled_function(node: Any) -> type | None:
    """The autograd.Function of a compiled graph that an autograd node belongs to; None for any other node."""
    return function_of(node) if node is not None and node.name() == COMPILED_NODE else None


def compile_id_of(function: type) -> str:
    """The id of the compilation that made an autograd.Function; "unknown" before torch 2.12."""
    return str(getattr(getattr(function, "metadata", None), "compile_id_str", "unknown"))


def graph_being_traced() -> torch.fx.Graph | None:
    """The graph that operators of this thread are recorded in; None if there is none."""
    return getattr(getattr(proxy_mode(), "tracer", None), "graph", None)


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether a node of AOT's joint graph was recorded while autograd ran, rather than in the forward."""
    return node.meta.get("partitioner_tag") != "is_forward"


def module_stack() -> list[tuple[str, Any]]:
    """Path and class of the modules around the operator that AOT traces, outer first, as dynamo noted them."""
    return list(traceback.current_meta.get("nn_module_stack", {}).values())


class _Compilations:
    """Counts dynamo's compilations, in the process and in each thread.

    A reset of dynamo removes every callback, and dynamo numbers compilations from 0/0 again.
    """

    def __init__(self) -> None:
        self.count = 0  # of compilations and resets
        self.resets = 0
        self.here = threading.local()

    def look(self) -> int:
        """The count. Begins to count, if it does not yet. Cheap: called in every region."""
        if "torch._dynamo.callback" not in sys.modules:
            return 0
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

    The autograd graph does not show it if no input requires grad.
    """

    _open: ClassVar[list[CompiledCalls]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _before: ClassVar[Any] = None

    def __enter__(self) -> CompiledCalls:
        self._thread = threading.get_ident()
        self._found_code = 0
        with self._lock:
            if not self._open:
                before: Any = _eval_frame.set_guard_complete_hook(self._found)
                # It is ours if somebody set a hook while one was open, and put ours back after that had closed.
                CompiledCalls._before = None if before is self._found else before
            self._open.append(self)
        compilations.look()
        self._begun_before = compilations.in_this_thread()
        return self

    def __exit__(self, *exception: object) -> None:
        self.count = self._found_code + compilations.in_this_thread() - self._begun_before
        with self._lock:
            self._open.remove(self)
            if not self._open:
                _eval_frame.set_guard_complete_hook(CompiledCalls._before)

    @staticmethod  # an object that lives: dynamo does not hold it while it calls it, and another thread may close
    def _found(cache_hit: bool) -> bool:
        """Called when dynamo has looked for compiled code. Returns whether it was found."""
        if cache_hit:
            thread = threading.get_ident()
            for one in list(CompiledCalls._open):
                one._found_code += one._thread == thread
        before = CompiledCalls._before
        return cache_hit if before is None else before(cache_hit)


_Inductor: Any = getattr(torch, "_TorchCompileInductorWrapper", object)


class InductorWith(_Inductor):  # type: ignore[misc]
    """Inductor as a backend for torch.compile, with a pass of ours over graphs that hold flex_attention.

    Other graphs are compiled as torch does it, with its caches. inductor caches no graph that a custom pass changed.
    """

    def __init__(self, graph_pass: Callable[[torch.fx.Graph], None], *options: Any) -> None:
        """options: mode, options and dynamic, as torch.compile takes them."""
        super().__init__(*options)
        self.graph_pass = graph_pass

    def __call__(self, model_: Any, inputs_: Any, *, config_patches: Any = None) -> Any:
        """Compile a graph of dynamo's."""
        patches = dict(config_patches or {})
        graphs = [inner.graph for inner in model_.modules() if isinstance(inner, torch.fx.GraphModule)]
        if any(node.target is FLEX_ATTENTION for graph in graphs for node in graph.nodes):
            from torch._inductor import config

            theirs = self.config.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
            others = theirs if isinstance(theirs, (list, tuple)) else [theirs] * (theirs is not None)
            patches["post_grad_custom_pre_pass"] = [*others, self.graph_pass]
        return super().__call__(model_, inputs_, config_patches=patches)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a part of a graph that inductor is about to compile. Returns a function of a list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    # The compile around this one must not learn of its strides nor, in a CUDA graph, of its buffers.
    with config.patch(post_grad_custom_pre_pass=None), TracingContext.patch(output_strides=None):
        compiled: Any = compile_fx_inner(module, inputs, cudagraphs=BoxedBool(False))
    return compiled  # type: ignore[no-any-return]
