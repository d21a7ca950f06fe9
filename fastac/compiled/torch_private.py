"""Private names of torch's compiler (dynamo, AOT, inductor) that fastac uses, in one place.

They were seen in torch 2.9 to 2.15, unless a comment says otherwise. fastac does not import the compiler. Numbers in
comments are issues and pull requests of pytorch.
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

# What stands in a graph. torch documents only the functions that put it there.
FLEX_ATTENTION = torch.ops.higher_order.flex_attention
NESTED_REGION = torch.ops.higher_order.invoke_subgraph
"""What torch.compiler.nested_compile_region becomes in a graph."""


def compile_id() -> str | None:
    """The id, such as "0/1", of dynamo's compilation in this thread; None if there is none."""
    # torch gives the id to callbacks when a compile begins (153596). No public function returns it later on.
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def compiled_function(node: Any) -> type | None:
    """The autograd.Function of a compiled graph that an autograd node belongs to; None for any other node."""
    return function_of(node) if node is not None and node.name() == COMPILED_NODE else None


def compile_id_of(function: type) -> str:
    """The id of the compilation that made an autograd.Function; "unknown" before torch 2.12."""
    # 111519 asks torch for an id on the Function itself. Releases before 2.12 have none on its metadata either.
    return str(getattr(getattr(function, "metadata", None), "compile_id_str", "unknown"))


def graph_being_traced() -> torch.fx.Graph | None:
    """The graph that operators of this thread are recorded in; None if there is none."""
    return getattr(getattr(proxy_mode(), "tracer", None), "graph", None)


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether a node of AOT's joint graph was recorded while autograd ran, rather than in the forward."""
    # AOT sets this tag on every node that it records. `autograd_backward`, a newer mark, is missing on some (182416).
    return node.meta.get("partitioner_tag") != "is_forward"


def module_stack() -> list[tuple[str, Any]]:
    """Path and class of the modules around the operator that AOT traces, outer first, as dynamo noted them."""
    # While AOT interprets dynamo's graph, this is the meta of the node that runs. It will be on the recorded node.
    return list(traceback.current_meta.get("nn_module_stack", {}).values())


class _Compilations:
    """Counts dynamo's compilations, in the process and in each thread.

    A reset of dynamo removes every callback, and dynamo numbers compilations from 0/0 again.
    """

    def __init__(self) -> None:
        self.count = 0  # compilations and resets
        self.resets = 0
        self.here = threading.local()

    def look(self) -> int:
        """The count. Begins to count, if it does not yet. Cheap: called in every region."""
        if "torch._dynamo.callback" not in sys.modules:
            return 0
        # `on_compile_start` (120764) appends to this list, too. But only the list shows whether a reset has emptied it.
        # Once there is a callback for resets (asked for in 194770), both can be registered once.
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
                # torch has one such hook, for guard collectives (156562), and no public way to see a cache hit. It is
                # on only while a region is observed: it costs a call of Python for every compiled call.
                previous: Any = _eval_frame.set_guard_complete_hook(self._found)
                # Our own hook may still be set: somebody set theirs while ours was, and restored ours after we closed.
                CompiledCalls._previous = None if previous is self._found else previous
            self._open.append(self)
        compilations.look()
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


# What torch.compile(backend="inductor") makes of its options. Ours is a subclass, so torch treats it like its own: it
# applies mode and options, and a reset of dynamo resets inductor.
_Inductor: Any = getattr(torch, "_TorchCompileInductorWrapper", object)


class InductorWith(_Inductor):  # type: ignore[misc]
    """Inductor as a backend for torch.compile, with a pass of ours over graphs that hold flex_attention.

    Other graphs are compiled as torch does it, with its caches. inductor caches no graph if a custom pass without a
    uuid may change it.
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

            # The user's passes run first. inductor takes a list of passes since 2.13 (184108).
            theirs = self.config.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
            others = theirs if isinstance(theirs, (list, tuple)) else [theirs] * (theirs is not None)
            patches["post_grad_custom_pre_pass"] = [*others, self.graph_pass]
        return super().__call__(model_, inputs_, config_patches=patches)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a part of a graph that inductor is about to compile. Returns a function of a list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    # inductor reports the strides of outputs to AOT through the context of the compile (105010). Those of this part
    # would be taken for those of the whole graph. Nor may a CUDA graph around it own the buffers of the part.
    with config.patch(post_grad_custom_pre_pass=None), TracingContext.patch(output_strides=None):
        compiled: Any = compile_fx_inner(module, inputs, cudagraphs=BoxedBool(False))
    return compiled  # type: ignore[no-any-return]
