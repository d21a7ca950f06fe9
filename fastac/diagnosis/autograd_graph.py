"""Reads the autograd graph of a region: attention that no op shows, and attention parameters that get no gradient."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from fastac.backends import opaque
from fastac.diagnosis.recognition import (
    has_attention_inputs,
    names_attention_kernel,
    no_attention,
    parameters_of,
    says_attention,
    suggested_visible,
)
from fastac.engine import torch_private
from fastac.engine.beginning import tensors_in
from fastac.engine.tape import Caller
from fastac.policy import Policy
from fastac.registry import is_other
from fastac.registry.torch_private import op_names


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested inputs or outputs, dataclasses among them."""
    return list(tensors_in(torch_private.tree_leaves(value)))


def nodes_between(outputs: Any, inputs: Any) -> list[Any]:
    """The autograd nodes between a region's inputs and its outputs, the first 20,000."""
    # By id, with the node as the value: Python's object of a node goes when nobody holds it, and its id is given away.
    seen: dict[int, Any] = {id(tensor.grad_fn): tensor.grad_fn for tensor in tensors_of(inputs)}
    begin = len(seen)
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(outputs)]
    while waiting and len(seen) < 20000:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting.extend(parent for parent, _ in node.next_functions)
    return list(seen.values())[begin:]


def leads_to(values: Iterable[Any], roots: Iterable[torch.Tensor]) -> bool:
    """Whether the autograd graph behind some values reaches one of the roots."""
    values = list(values)
    nodes = nodes_between(values, ())  # held while their ids are compared
    reached = set(map(id, values + nodes)) | {id(getattr(node, "variable", None)) for node in nodes}
    return any(id(root if root.grad_fn is None else root.grad_fn) in reached for root in roots if root.requires_grad)


# torch gives this name in torch/_library/autograd.py. `Observer` makes the same names from the ops that it sees, and
# `functions_without_calls` compares the two.
GENERATED = "GeneratedBackwardFor_"
"""Begins the name of the Function that torch.library makes for an op. Namespace, name and overload follow."""


def place_of(function: type) -> tuple[str, str]:
    """Namespace and name of the op that torch.library made a Function for; module and name of any other Function."""
    # Underscores join the three parts and are legal in each, so the name cannot be taken apart: all ops are tried.
    for qualified in op_names() if function.__name__.startswith(GENERATED) else ():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if function.__name__ == f"{GENERATED}{namespace}_{name}_{overload or 'default'}":
            return namespace, name
    return function.__module__, function.__name__


def recorded_nodes(nodes: Sequence[Any], callers: Iterable[Caller]) -> set[int]:
    """Sequence numbers of the nodes in which attention calls were recorded.

    callers: for each recorded attention call, the newest autograd node when it was made, and the code that was running.
        If an autograd.Function made the call, the newest node is the Function's, or a node of a graph inside its
        forward, which is not in `nodes`.
    """
    by_number = {torch_private.sequence_number(node): node for node in nodes}
    numbers = sorted(by_number)
    recorded = set()
    for newest, codes in callers:
        position = bisect.bisect_right(numbers, newest) - 1
        if position < 0:
            continue
        function = torch_private.function_of(by_number[numbers[position]])
        code = getattr(getattr(function, "forward", None), "__code__", None)
        # Attention without a gradient makes no node: after a hidden Function its newest node is the Function's. The
        # running code tells the two apart.
        if code is None or id(code) in codes:
            recorded.add(numbers[position])
    return recorded


Shapes = list[torch.Size | None]
"""Shapes of the inputs of an autograd node; None for an input that needs no gradient or is not a tensor."""


def functions_without_calls(
    nodes: Sequence[Any], callers: Iterable[Caller], ops: Collection[str]
) -> list[tuple[type, Shapes]]:
    """The autograd.Functions of some nodes that recorded no attention call, with the shapes of their inputs.

    Functions that are not an attention, as a row says, are left out.

    Args:
        callers: as in `recorded_nodes`.
        ops: ops that were observed, as torch names their nodes. Other ops were called in another thread.
    """
    recorded = recorded_nodes(nodes, callers)
    functions = []
    for node in nodes:
        function = torch_private.function_of(node)
        if function is None or torch_private.sequence_number(node) in recorded or function.__name__ in ops:
            continue
        if not is_other(*place_of(function)):
            functions.append((function, torch_private.input_shapes(node)))
    return functions


def foreign_functions(functions: Iterable[tuple[type, Shapes]]) -> dict[type, Shapes]:
    """Those among some Functions that neither torch nor fastac knows."""
    return {
        function: shapes
        for function, shapes in functions
        if not opaque.is_visible(function) and function.__module__.partition(".")[0] != "torch"
    }


def hidden_attention(functions: Iterable[tuple[type, Shapes]], policy: Policy) -> list[str]:
    """Sentences on those among some Functions that look like an attention which the policy saves."""
    hidden: dict[type, str] = {}
    for function, shapes in functions:
        # A visible Function that recorded no call: its kernel ran where the tape was not open, in another thread.
        keys = sys.maxsize if opaque.is_visible(function) else _keys_of_attention(function, shapes)
        if keys and policy.saves(keys):
            hidden.setdefault(function, _hidden(function, shapes))
    return list(hidden.values())


def _keys_of_attention(function: type, shapes: Shapes) -> int:
    """The number of keys of the attention that a Function looks like, by its name and inputs; 0 if it is like none."""
    namespace, name = place_of(function)
    # A module's name says nothing: attention modules have Functions for much else.
    library = namespace if function.__name__.startswith(GENERATED) else ""
    if not names_attention_kernel(name, library) or not any(shapes):
        return 0
    if not has_attention_inputs(shapes, parameters_of(function)):
        return 0
    key = shapes[min(1, len(shapes) - 1)]
    known = [shape for shape in shapes if shape is not None] if key is None else [key]
    return max(size for shape in known for size in shape[1:-1] or shape[:1])


def _hidden(function: type, shapes: Shapes) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if opaque.is_visible(function):
        return f"{name}, made visible, was called with a tensor subclass (such as DTensor) or in another thread"
    if function.__name__.startswith(GENERATED):
        namespace, own = place_of(function)
        return (
            f"the op {namespace}::{own} looks like an attention, and was called in another thread: call it in the "
            f"block's own. If it is none: {no_attention(namespace, own)}"
        )
    return (
        f"{name}, an autograd.Function, looks like an attention, and no op shows its kernel. Once, before training: "
        f"{suggested_visible(function, shapes)}. If it is none: {no_attention(function.__module__, function.__name__)}"
    )


def parameters_cut_off(module: torch.nn.Module | None, nodes: Iterable[Any]) -> list[str]:
    """Names of a block's attention parameters that require grad and that its outputs do not depend on.

    A kernel without a backward (SageAttention) does that: gradients before it are None, without an error.
    """
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    named = module.named_parameters() if module is not None else ()
    trained = {name: p for name, p in named if p.requires_grad and says_attention(name.rpartition(".")[0])}
    # A DTensor is FSDP's shard. It has replaced the parameter that was used, so the graph does not reach it.
    cut_off = [name for name, p in trained.items() if id(p) not in reached and not hasattr(p, "to_local")]
    # If all are cut off, inputs are frozen or the block took another path: that is legal.
    return cut_off if len(cut_off) < len(trained) else []
