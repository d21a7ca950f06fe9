"""Private names of torch that the graph passes use, in one place, as `fastac.torch_internals` is for the engine.

Seen in torch 2.13. Each is looked up at import; one that went away is an ImportError that names it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.exc
import torch._functorch.partitioners
import torch._inductor.config
import torch._inductor.custom_graph_pass
import torch.autograd
import torch.autograd.graph
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from fastac.engine import torch_private
from fastac.errors import FastacError

_REQUIRED = (
    "_C._DisableAutocast",
    "_C.Generator._cdata",
    "_dynamo.config.error_on_nested_fx_trace",
    "_dynamo.config.trace_autograd_ops",
    "_dynamo.exc.BackendCompilerFailed",
    "_dynamo.exc.Unsupported",
    "_functorch.partitioners.min_cut_rematerialization_partition",
    "_inductor.config._post_fusion_custom_pass",
    "_inductor.config.combo_kernels",
    "_inductor.config.joint_custom_pre_pass",
    "_inductor.config.post_grad_custom_post_pass",
    "_inductor.config.reorder_for_locality",
    "_inductor.config.reorder_for_peak_memory",
    "_inductor.custom_graph_pass.CustomPartitionerFn",
    "_ops.OpOverload",
    "_subclasses.FakeTensorMode",
    "_subclasses.fake_tensor.DataDependentOutputException",
    "_subclasses.fake_tensor.DynamicOutputShapeException",
    "autograd._engine_run_backward",
    "autograd.graph._engine_run_backward",
    "compiler._non_strict_tracing_context",
)

torch_private.require(_REQUIRED, "fastac.graph")

SCHEDULER = (
    "_inductor.choices.InductorChoices.can_fuse",
    "_inductor.ir.Operation.get_origins",
    "_inductor.scheduler.BaseSchedulerNode.get_nodes",
    "_inductor.virtualized.V.choices",
    "_inductor.virtualized.V.set_choices_handler",
)
"""What of inductor takes a second to import, and is looked up where it is first needed."""


@functools.cache
def _require_scheduler() -> None:
    torch_private.require(SCHEDULER, "fastac.graph.compile")


_TRACING = threading.RLock()
"""One trace at a time: what make_fx and `tracing` change is the process's."""


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real ones that a function holds on to may enter it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


LOOKED_AT_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""What a trace raises where the next thing to do depends on the values of a tensor."""


def fake_of(value: Any, mode: FakeTensorMode) -> Any:
    """A stand-in for a tensor, of constant sizes, with one for its gradient; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


def fake_mode_of(graph_module: torch.fx.GraphModule) -> FakeTensorMode | None:
    """The mode that the values of a graph's inputs were made in."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and torch_private.is_fake(node.meta.get("val")):
            return node.meta["val"].fake_mode  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def tracing(mode: FakeTensorMode, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """What `make_fx` needs to trace a training step: nodes keep what they are marked with, backward is marked.

    stand_ins: by the id of a tensor, what is differentiated in its place: a step may hold a list of parameters.

    torch.utils.checkpoint in the step recomputes in the graph as it does in eager mode, and leaves nothing in the
    process that a later compile would stumble over.
    """
    with (
        _TRACING,
        mode,
        preserve_node_meta(),  # restores what is current as well, also where torch's own checkpointing left tags in it
        _marked_backward(stand_ins),
        torch.autograd.set_multithreading_enabled(False),  # backward in this thread, where the trace is
        torch.compiler._non_strict_tracing_context(),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),  # compiled functions are traced as they are
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def retracing(mode: FakeTensorMode) -> Iterator[None]:
    """What `make_fx` needs to trace a graph again."""
    with mode, torch.no_grad(), preserve_node_meta():
        yield


@contextlib.contextmanager
def _marked_backward(stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    engine = torch.autograd.graph._engine_run_backward
    tracing_thread = threading.get_ident()

    def stand_in(value: Any) -> Any:
        found = stand_ins.get(id(value), value)
        if isinstance(found, torch.Tensor) and not torch_private.is_fake(found):
            raise FastacError(
                f"trace: the step differentiates by a tensor of shape {tuple(found.shape)} that is neither a parameter "
                f"of the model nor computed from the arguments. Pass it as an argument, or pass a module that holds "
                f"all that is trained as the model."
            )
        return found

    def run(outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing_thread:  # the engine is one for the process
            return engine(outputs, gradients, keep, create, inputs, *args, **kwargs)
        with annotate(BACKWARD):
            return engine(outputs, gradients, keep, create, tuple(map(stand_in, inputs)), *args, **kwargs)

    torch.autograd.graph._engine_run_backward = run  # type: ignore[assignment]
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        torch.autograd.graph._engine_run_backward = engine
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]


BACKWARD = {"phase": "backward"}
"""The mark that torch's own passes know backward by (`node.meta["custom"]`)."""


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """What a traced graph runs under: its casts are nodes of its own, and its backward, too."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


def is_functional(node: torch.fx.Node) -> bool:
    """Whether a node's op changes none of its arguments, as far as its schema says."""
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def is_drawing(node: torch.fx.Node) -> bool:
    """Whether torch says that a node's op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def identity(generator: torch.Generator) -> int:
    """What tells a generator from others; the dispatcher hands out new Python objects for one."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def tracing_autograd_calls() -> contextlib.AbstractContextManager[None]:
    """In which dynamo takes `torch.autograd.grad` into its graph, where it would else break it."""
    return torch._dynamo.config.patch(trace_autograd_ops=True)  # type: ignore[no-any-return]


@contextlib.contextmanager
def inductor_choosing(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """In which inductor asks, for all that is a matter of choice, what `wrap` makes of the object it would ask."""
    _require_scheduler()
    from torch._inductor.virtualized import V

    with V.set_choices_handler(wrap(V.choices)):
        yield


def origins(scheduled: Any) -> Iterator[torch.fx.Node]:
    """The nodes of inductor's graph that an operation of its scheduler, fused or not, was made from."""
    for operation in scheduled.get_nodes():
        if operation.node is not None:
            yield from operation.node.get_origins()


POST_FUSION = "_post_fusion_custom_pass"
"""Name of the option of inductor for what is called with its scheduler's nodes when it has fused them."""

min_cut = torch._functorch.partitioners.min_cut_rematerialization_partition
"""torch's partitioner: it decides by dependency which nodes belong to the backward, and obeys meta["recompute"]."""

CustomPartitioner: Any = torch._inductor.custom_graph_pass.CustomPartitionerFn
"""What inductor's `custom_partitioner_fn` must be an instance of."""

COLLECTIVES = "_c10d_functional"
"""Namespace of the functional collectives."""


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph holds a gradient that comes in."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def says_parameter(node: torch.fx.Node) -> bool | None:
    """Whether AOT says that a placeholder of a joint graph is a parameter; None where it says nothing."""
    description = node.meta.get("desc")
    return None if description is None else bool(description.is_param())


def schema_of(node: torch.fx.Node) -> torch.FunctionSchema | None:
    """The schema of the op that a node calls; None for anything that is not an op of the dispatcher."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def leaf_paths(tree: Any) -> list[tuple[Any, ...]]:
    """For every leaf of nested containers, the keys (`key` or `idx`) that lead to it."""
    return [path for path, _ in tree_flatten_with_path(tree)[0]]


def path_text(path: Iterable[Any]) -> str:
    """Keys as they are written in Python: ['x'][0]."""
    return keystr(tuple(path))


Unsupported = torch._dynamo.exc.Unsupported
BackendFailed = torch._dynamo.exc.BackendCompilerFailed
"""What dynamo raises for code that it can not take into one graph."""

CONSUMED = "autograd.grad consumed"
"""In dynamo's message where a step returns a loss whose graph `torch.autograd.grad` has freed."""
