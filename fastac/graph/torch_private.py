"""Private names of torch that `fastac.graph` uses, in one place.

They were seen in torch 2.12 to 2.15, most of them since 2.9. Numbers in comments are issues and pull requests of
pytorch.
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

# torch has no public module for trees (2.9 to 2.15). make_fx flattens arguments by this one.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_unflatten as tree_unflatten

from fastac.engine import torch_private
from fastac.errors import FastacError

# The user's annotation for torch's own rematerialization pass, which reads the backward by it since pytorch#179105.
# Nodes have `node.meta["autograd_backward"]` as well, but only under torch's own tracers.
BACKWARD_PHASE = {"phase": "backward"}
"""The mark of the backward (`node.meta["custom"]`)."""

COLLECTIVES = "_c10d_functional"
"""Namespace of the functional collectives."""

# torch.autocast(enabled=False) is for one type of device, and this is for all of them.
without_autocast = torch._C._DisableAutocast
"""A context for traced graphs: their casts are nodes."""

# There is no public partitioner. The tags that it obeys are torch's interface to it since pytorch#103357.
min_cut = torch._functorch.partitioners.min_cut_rematerialization_partition
"""torch's partitioner: it decides by dependency which nodes belong to the backward, and obeys meta["recompute"]."""

# inductor takes a partitioner of the user's only as an instance of this class (pytorch#157580).
_CustomPartitioner: Any = torch._inductor.custom_graph_pass.CustomPartitionerFn


class Partitioner(_CustomPartitioner):  # type: ignore[misc]
    """A partitioner for AOT, and for inductor as its `custom_partitioner_fn`."""

    def uuid(self) -> None:
        """None: inductor must not take the graphs of another partitioner from its cache."""


_TRACING = threading.RLock()
"""One trace at a time: make_fx and `tracing` change state of the process."""


# Tracing


def fakes_of(values: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """A mode in which tensors have shapes and no data, and the values in it. Values that are not tensors stay as is.

    Sizes are constant. Ops also take real tensors that a function holds.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(leaf, static_shapes=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in values]
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
        # Keeps annotations on nodes. It also restores the current ones: torch's own checkpointing may leave tags there,
        # with which a later, unrelated torch.compile fails.
        preserve_node_meta(),
        _backward_marked(fakes),
        # autograd would run the backward of CUDA tensors in another thread, and the trace is in this one.
        torch.autograd.set_multithreading_enabled(False),
        # torch's checkpoint recomputes in the trace, as in eager mode (pytorch#179048, since 2.12). Without it regions
        # would be tagged for a compiler, and nothing recomputed. torch plans to drop the eager way: then they are
        # tagged again.
        torch.compiler._non_strict_tracing_context(),
        # Compiled functions in the step are traced through: by default they are an error in an fx trace (87797).
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def _backward_marked(fakes: Mapping[int, torch.Tensor]) -> Iterator[None]:
    # `backward` and `grad` both come through this function. torch.compiler._patch_engine_backward (2.13 to 2.15) marks
    # the backward at the same place, but it does not replace what the step differentiates by.
    engine = torch.autograd.graph._engine_run_backward

    def fake(value: Any) -> Any:
        value = fakes.get(id(value), value)
        if isinstance(value, torch.Tensor) and not torch_private.is_fake(value):
            raise FastacError(
                f"trace: the step differentiates by a tensor of shape {tuple(value.shape)} that is neither a parameter "
                f"of the model nor computed from the arguments. Pass it as an argument, or pass a module that holds "
                f"everything that is trained as the model."
            )
        return value

    def run(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.fx.traceback.annotate(BACKWARD_PHASE):
            return engine(outputs, gradients, retain, create, tuple(map(fake, inputs)), *args, **kwargs)

    # torch.autograd imports the function by name, so that it stands in two modules.
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
    """`namespace::name` of the op that a node calls, without overload; "" for anything that is not an op."""
    schema = schema_of(node)
    return "" if schema is None else schema.name


def returns_views(node: torch.fx.Node) -> bool:
    """Whether the outputs of a node's op are views of its inputs, by its schema."""
    schema = schema_of(node)
    return schema is not None and is_functional(node) and any(value.alias_info is not None for value in schema.returns)


def is_functional(node: torch.fx.Node) -> bool:
    """Whether a node's op changes none of its arguments, by its schema."""
    schema = schema_of(node)
    return schema is None or not schema.is_mutable


def is_drawing(node: torch.fx.Node) -> bool:
    """Whether torch says that a node's op draws random numbers. It says so of all attention, even without dropout."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph holds an incoming gradient."""
    # torch's partitioners know tangents by this name, too (`_is_tangent`).
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_parameter(node: torch.fx.Node) -> bool:
    """Whether AOT describes a placeholder of a joint graph as a parameter."""
    # A graph that was traced without AOT's descriptors has no such key: see `parameters_of` for those.
    description = node.meta.get("desc")
    return description is not None and bool(description.is_param())
