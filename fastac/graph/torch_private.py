"""Private names of torch that `fastac.graph` uses, in one place.

Seen in torch 2.12 to 2.15, most of them since 2.9.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.partitioners
import torch._inductor.custom_graph_pass
import torch.autograd
import torch.autograd.graph
from torch._subclasses import FakeTensorMode
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_unflatten as tree_unflatten

from fastac.engine import torch_private
from fastac.errors import FastacError

BACKWARD = {"phase": "backward"}
"""The mark of the backward for torch's own passes (`node.meta["custom"]`)."""

COLLECTIVES = "_c10d_functional"
"""Namespace of the functional collectives."""

without_autocast = torch._C._DisableAutocast
"""A context for traced graphs: their casts are nodes."""

min_cut = torch._functorch.partitioners.min_cut_rematerialization_partition
"""torch's partitioner: it decides by dependency which nodes belong to the backward, and obeys meta["recompute"]."""

_CustomPartitioner: Any = torch._inductor.custom_graph_pass.CustomPartitionerFn


class Partitioner(_CustomPartitioner):  # type: ignore[misc]
    """A partitioner for AOT, and for inductor as its `custom_partitioner_fn`."""

    def uuid(self) -> None:
        """None: inductor must not take the graphs of another partitioner from its cache."""


_TRACING = threading.RLock()
"""One trace at a time: make_fx and `tracing` change state of the process."""


# Tracing


def fakes_of(values: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """A mode in which tensors have shapes and no data, and the values in it; those that are no tensors unchanged.

    Sizes are constant. Ops also take real tensors that a function holds.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(one, static_shapes=True) if isinstance(one, torch.Tensor) else one for one in values]
    return mode, fakes


def fake_mode_of(graph_module: torch.fx.GraphModule) -> FakeTensorMode:
    """The mode of the fake tensors that are a graph's inputs. Raises FastacError if there are none."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and torch_private.is_fake(node.meta.get("val")):
            return node.meta["val"].fake_mode  # type: ignore[no-any-return]
    raise FastacError("The graph has no fake tensors as inputs. Trace it with fastac.graph.trace, or make_fx on some.")


@contextlib.contextmanager
def tracing(mode: FakeTensorMode, fakes: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """A context for `make_fx` over a training step: nodes keep their marks, and the backward is marked.

    A torch.utils.checkpoint in the step recomputes in the graph as it does in eager mode, and leaves nothing in the
    process that a later compile would read.

    fakes: id of a tensor -> the tensor to differentiate by in its place: a step may hold a list of parameters.
    """
    with (
        _TRACING,
        mode,
        preserve_node_meta(),  # also restores the current marks, in which torch's own checkpointing may leave tags
        _backward_marked(fakes),
        torch.autograd.set_multithreading_enabled(False),  # the backward in this thread, where the trace is
        torch.compiler._non_strict_tracing_context(),  # since 2.12
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),  # compiled functions are traced as they are
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def _backward_marked(fakes: Mapping[int, torch.Tensor]) -> Iterator[None]:
    engine = torch.autograd.graph._engine_run_backward

    def fake(value: Any) -> Any:
        found = fakes.get(id(value), value)
        if isinstance(found, torch.Tensor) and not torch_private.is_fake(found):
            raise FastacError(
                f"trace: the step differentiates by a tensor of shape {tuple(found.shape)} that is neither a parameter "
                f"of the model nor computed from the arguments. Pass it as an argument, or pass a module that holds "
                f"everything that is trained as the model."
            )
        return found

    def run(outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.fx.traceback.annotate(BACKWARD):
            return engine(outputs, gradients, keep, create, tuple(map(fake, inputs)), *args, **kwargs)

    torch.autograd.graph._engine_run_backward = run  # type: ignore[assignment]
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        torch.autograd.graph._engine_run_backward = engine
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]


# Nodes


def schema_of(node: torch.fx.Node) -> torch.FunctionSchema | None:
    """The schema of the op that a node calls; None for anything that is not an op of the dispatcher."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def op_name(node: torch.fx.Node) -> str:
    """`namespace::name` of the op that a node calls, without overload; "" for anything that is no op."""
    schema = schema_of(node)
    return "" if schema is None else schema.name


def returns_views(node: torch.fx.Node) -> bool:
    """Whether the outputs of a node's op are views of its inputs, by its schema."""
    schema = schema_of(node)
    return schema is not None and is_functional(node) and any(one.alias_info is not None for one in schema.returns)


def is_functional(node: torch.fx.Node) -> bool:
    """Whether a node's op changes none of its arguments, by its schema."""
    schema = schema_of(node)
    return schema is None or not schema.is_mutable


def is_drawing(node: torch.fx.Node) -> bool:
    """Whether torch says that a node's op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph holds an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_parameter(node: torch.fx.Node) -> bool:
    """Whether AOT describes a placeholder of a joint graph as a parameter."""
    description = node.meta.get("desc")
    return description is not None and bool(description.is_param())
