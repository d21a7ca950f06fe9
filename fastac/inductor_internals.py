"""What is private in torch's compiler and fastac uses: dynamo's view of compiled calls, and inductor's entry points.

Seen in torch 2.13. What is there as soon as torch is imported is looked up at import. Inductor, which takes a second to
import, is looked up where it is first needed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame
from torch._guards import TracingContext

from fastac import probing, torch_internals

_REQUIRED = (
    "_C._dynamo.eval_frame.get_eval_frame_callback",
    "_C._dynamo.eval_frame.set_guard_complete_hook",
    "_TorchCompileInductorWrapper",
    "_guards.TracingContext.patch",
    "ops.higher_order.flex_attention",
)

COMPILER = (
    "_dynamo.callback.callback_handler.register_start_callback",
    "_dynamo.callback.callback_handler.remove_start_callback",
    "_dynamo.callback.callback_handler.start_callbacks",
    "_inductor.compile_fx.compile_fx_inner",
    "_inductor.config.patch",
    "_inductor.config.post_grad_custom_pre_pass",
    "_inductor.utils.BoxedBool",
)

probing.require(_REQUIRED)

FLEX_ATTENTION = torch.ops.higher_order.flex_attention

Pass = Callable[[torch.fx.Graph], None]


@functools.cache
def require() -> None:
    """Raise ImportError when torch's compiler lacks what fastac needs of it to keep flex_attention apart."""
    probing.require(COMPILER)


class InductorWith(torch._TorchCompileInductorWrapper):
    """Inductor as a backend for torch.compile, with a pass of ours over graphs that hold flex_attention.

    Others it compiles as torch does, with its caches, which no graph is put into that a foreign pass went over.
    mode, options, dynamic: those of torch.compile.
    """

    def __init__(self, graph_pass: Pass, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None):
        require()
        super().__init__(mode, options, dynamic)  # type: ignore[no-untyped-call]
        self.graph_pass = graph_pass

    def __call__(self, model_: Any, inputs_: Any, *, config_patches: Any = None) -> Any:
        """Compile a graph of dynamo's."""
        patches = dict(config_patches or {})
        if _holds_flex(model_):
            others = passes(self.config, "post_grad_custom_pre_pass")
            patches["post_grad_custom_pre_pass"] = [*others, self.graph_pass]
        return super().__call__(model_, inputs_, config_patches=patches)  # type: ignore[no-untyped-call]


def passes(options: Mapping[str, Any], name: str) -> list[Any]:
    """The passes that somebody else has put in a place of inductor's: in these options, or in its configuration."""
    from torch._inductor import config

    given = options.get(name, getattr(config, name))
    return list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []


def _holds_flex(module: torch.fx.GraphModule) -> bool:
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]
    return any(node.target is FLEX_ATTENTION for graph in graphs for node in graph.nodes)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a part of a graph that inductor is about to compile. Returns a function of the list of its inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    # Around it nothing is to learn of this compile: neither its strides nor, in a CUDA graph, its buffers.
    with config.patch(post_grad_custom_pre_pass=None), TracingContext.patch(output_strides=None):
        compiled: Any = compile_fx_inner(module, inputs, cudagraphs=BoxedBool(False))
    return compiled  # type: ignore[no-any-return]


def was_given_up() -> bool:
    """Whether the caller runs eagerly inside what torch.compile was applied to, as after a graph break."""
    return callable(_eval_frame.get_eval_frame_callback())


def empty_outputs(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros in the shapes that an op would return, without running it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = torch_internals.tree_map(lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, args)
        outputs = op(*fakes, **kwargs)

    def zeros(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.zero_()

    return torch_internals.tree_map(zeros, outputs)


class CompiledCalls:
    """Counts, in the thread that opens it, how often code is run or made that torch.compile compiles.

    From the autograd graph that can not be known where no input requires grad.
    """

    _open: ClassVar[list[CompiledCalls]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _before: ClassVar[Any] = None

    def __init__(self) -> None:
        self.count = 0
        self._thread = 0

    def __enter__(self) -> CompiledCalls:
        self._thread = threading.get_ident()
        with self._lock:
            if not self._open:
                before: Any = _eval_frame.set_guard_complete_hook(self._found)
                # Ours, where somebody came while one was open, and put back what had been there after it had closed.
                CompiledCalls._before = None if before is self._found else before
            self._open.append(self)
        self.listen()
        return self

    def listen(self) -> None:
        """Be told of compilations, also after a reset of dynamo, in whatever thread, which takes callbacks away."""
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if self._begun not in callback_handler.start_callbacks:
                callback_handler.register_start_callback(self._begun)

    def __exit__(self, *exception: object) -> None:
        from torch._dynamo.callback import callback_handler

        with self._lock:
            self._open.remove(self)
            if not self._open:
                _eval_frame.set_guard_complete_hook(CompiledCalls._before)
                with contextlib.suppress(ValueError):  # dynamo was reset
                    callback_handler.remove_start_callback(self._begun)

    @staticmethod  # one object for good: dynamo does not hold it while it calls it, and another thread may close
    def _found(cache_hit: bool) -> bool:
        """dynamo has looked for compiled code; what this returns says whether it was found."""
        if cache_hit:
            CompiledCalls._noted()
        before = CompiledCalls._before
        return cache_hit if before is None else before(cache_hit)

    @staticmethod
    def _begun(_: object) -> None:
        CompiledCalls._noted()

    @classmethod
    def _noted(cls) -> None:
        thread = threading.get_ident()
        for one in list(cls._open):
            if one._thread == thread:
                one.count += 1
