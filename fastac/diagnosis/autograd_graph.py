"""Reads the autograd graph of a region: attention that no op shows, and attention parameters that get no gradient."""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from fastac.diagnosis.recognition import has_attention_inputs, names_attention_kernel, parameters_of, says_attention
from fastac.engine import opaque, torch_private
from fastac.engine.tape import Caller
from fastac.policy import Policy
from fastac.registry import is_other
from fastac.registry.torch_private import op_names


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested inputs or outputs, dataclasses among them."""
    tensors: list[torch.Tensor] = []
    for leaf in torch_private.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return tensors


def nodes_between(outputs: Any, inputs: Any, limit: int = 20000) -> list[Any]:
    """The autograd nodes between a region's inputs and its outputs."""
    # By id, with the node as the value: Python's object of a node goes when nobody holds it, and its id is given away.
    seen: dict[int, Any] = {id(tensor.grad_fn): tensor.grad_fn for tensor in tensors_of(inputs)}
    begin = len(seen)
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(outputs)]
    while waiting and len(seen) < limit:
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
# `hidden_functions` compares the two.
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


def foreign_functions(nodes: Sequence[Any], recorded: Collection[int]) -> dict[type, list[torch.Size | None]]:
    """The autograd.Functions among some nodes that fastac does not know, with the shapes of their inputs.

    They are not torch's, recorded no attention, and no row says that they are not an attention.

    recorded: sequence numbers of nodes in which attention calls were recorded.
    """
    foreign: dict[type, list[torch.Size | None]] = {}
    for node in nodes:
        function = torch_private.function_of(node)
        if function is None or torch_private.sequence_number(node) in recorded:
            continue
        is_known = opaque.is_visible(function) or is_other(function.__module__, function.__name__)
        if not is_known and function.__module__.partition(".")[0] != "torch":
            foreign.setdefault(function, torch_private.input_shapes(node))
    return foreign


def hidden_functions(
    nodes: Sequence[Any], recorded: Collection[int], policy: Policy, seen: Collection[str] = ()
) -> dict[type, list[torch.Size | None]]:
    """The Functions among these nodes that look like an attention which the policy saves, and recorded no call.

    recorded: sequence numbers of nodes in which attention calls were recorded.
    seen: ops that were observed, as torch names their nodes. Other ops were called in another thread.

    Returns:
        The Functions, with the shapes of their inputs.
    """
    hidden: dict[type, list[torch.Size | None]] = {}
    for node in nodes:
        function = torch_private.function_of(node)
        if function is None or torch_private.sequence_number(node) in recorded or function.__name__ in seen:
            continue
        place = place_of(function)
        if is_other(*place):
            continue
        # A visible Function that recorded no call: its kernel ran where the tape was not open, in another thread.
        keys = sys.maxsize if opaque.is_visible(function) else _keys_of_attention(node, function, *place)
        if keys and policy.saves(keys):
            hidden.setdefault(function, torch_private.input_shapes(node))
    return hidden


def may_run_again(node: Any) -> bool:
    """Whether attention that runs during this node's backward is expected.

    If not, a checkpoint that is not fastac's is running it again. An attention's own backward may run its forward again
    (diffusers' context parallelism does), with or without checkpointing. So may Functions of torch: custom ops,
    torch.cond. A graph of torch.compile may not: if it does, the compiler did not keep what it should.
    """
    if node.name() == torch_private.COMPILED_NODE:
        return False
    function = torch_private.function_of(node)
    if function is None or function.__module__.startswith("torch._") or opaque.is_visible(function):
        return True
    name = function.__name__
    return names_attention_kernel(name) and "checkpoint" not in name.lower()


def _keys_of_attention(node: Any, function: type, namespace: str, name: str) -> int:
    """The number of keys of the attention that a node looks like, by its name and inputs; 0 if it looks like none."""
    shapes = torch_private.input_shapes(node)
    # A module's name says nothing: attention modules have Functions for much else.
    library = namespace if function.__name__.startswith(GENERATED) else ""
    if not names_attention_kernel(name, library) or not any(shapes):
        return 0
    if not has_attention_inputs(shapes, parameters_of(function)):
        return 0
    key = shapes[min(1, len(shapes) - 1)]
    known = [shape for shape in shapes if shape is not None] if key is None else [key]
    return max(size for shape in known for size in shape[1:-1] or shape[:1])


def parameters_cut_off(module: torch.nn.Module | None, nodes: Iterable[Any]) -> list[str]:
    """Names of a block's attention parameters that require grad and that its outputs do not depend on.

    A kernel without a backward (SageAttention) does that: gradients before it are None, without an error.
    """
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    named = module.named_parameters() if module is not None else ()
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    trained = [(name, parameter) for name, parameter in trained if says_attention(name.rpartition(".")[0])]
    # A DTensor is FSDP's shard. It has replaced the parameter that was used, so the graph does not reach it.
    plain = [(name, parameter) for name, parameter in trained if not hasattr(parameter, "to_local")]
    cut_off = [name for name, parameter in plain if id(parameter) not in reached]
    # If all are cut off, inputs are frozen or the block took another path: that is legal.
    return cut_off if len(cut_off) < len(trained) else []
