"""What the autograd graph of a region tells: where it begins, compiled code in it, attention that no op showed."""

from __future__ import annotations

import bisect
import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastac.diagnosis.recognition import names_attention_kernel, says_attention
from fastac.engine import opaque, torch_private
from fastac.policy import Policy


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested inputs or outputs, dataclasses among them."""
    found: list[torch.Tensor] = []
    for leaf in torch_private.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def nodes_between(outputs: Any, inputs: Any, limit: int = 20000) -> list[Any]:
    """The autograd nodes between a region's inputs and its outputs."""
    seen: dict[int, Any] = {id(tensor.grad_fn): tensor.grad_fn for tensor in tensors_of(inputs)}
    begin = len(seen)
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(outputs)]
    while waiting and len(seen) < limit:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting.extend(parent for parent, _ in node.next_functions)
    return list(seen.values())[begin:]


def ran_compiled_code(nodes: Iterable[Any]) -> bool:
    """Whether some of these autograd nodes stand for code that torch.compile made."""
    return any(node.name() == torch_private.COMPILED_NODE for node in nodes)


def hidden_functions(nodes: Sequence[Any], owners: Iterable[int], policy: Policy) -> list[type]:
    """The autograd.Functions among these nodes that look like an attention the policy saves, and recorded no call.

    owners: for each recorded attention call, the node that was the newest when it was made. In the forward of a
    Function that is its own node, or one of a graph inside it, of which none is among these nodes.
    """
    numbers = sorted(torch_private.sequence_number(node) for node in nodes)
    recorded = {numbers[bisect.bisect_right(numbers, owner) - 1] for owner in owners if numbers}
    found = []
    for node in nodes:
        function = torch_private.function_of(node)
        if function is None or torch_private.sequence_number(node) in recorded:
            continue
        keys = _keys_of_attention(node)
        if keys is None and opaque.is_visible(function):
            keys = sys.maxsize  # whatever it is called
        if keys is not None and policy.saves(keys):
            found.append(function)
    return list(dict.fromkeys(found))


def may_run_again(node: Any) -> bool:
    """Whether attention in the backward of a node is no sign of a checkpoint.

    An attention's own backward may run its forward again (diffusers' context parallelism), as without checkpointing;
    so may Functions of torch's own: of compiled code, custom ops, torch.cond.
    """
    function = torch_private.function_of(node)
    if function is None or function.__module__.startswith("torch._") or opaque.is_visible(function):
        return True
    words = _words(node)
    return names_attention_kernel(words) and "checkpoint" not in words.lower()


def _words(node: Any) -> str:
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)


def _keys_of_attention(node: Any) -> int | None:
    """How many keys an attention may have that a node looks like, by its name and inputs; None when it does not."""
    shapes = torch_private.input_shapes(node)
    known = [shape for shape in shapes if shape is not None and 3 <= len(shape) <= 5]
    if not names_attention_kernel(_words(node)) or len(shapes) < 3 or not known:
        return None
    key = shapes[1] if shapes[1] in known else None
    return max(key[1:-1] if key is not None else [size for shape in known for size in shape[:-1]])


def parameters_cut_off(module: torch.nn.Module | None, nodes: Iterable[Any]) -> list[str]:
    """Names of a block's attention parameters that require grad and have no part in its outputs.

    Behind a kernel without a backward gradients are None, and nobody is told: SageAttention does that.
    """
    if module is None:
        return []
    reached = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    parameters = [(name, parameter) for name, parameter in named if says_attention(name.rpartition(".")[0])]
    # FSDP has put a shard in the place of the parameter that was used.
    whole = [(name, parameter) for name, parameter in parameters if not hasattr(parameter, "to_local")]
    cut_off = [name for name, parameter in whole if id(parameter) not in reached]
    return cut_off if len(cut_off) < len(parameters) else []  # all of them: frozen inputs, or another path was taken


def graph_roots(tensors: Iterable[torch.Tensor]) -> dict[int, object]:
    """Where the autograd graph of a region begins, by id: its inputs and the block's parameters."""
    roots = [t if t.grad_fn is None else t.grad_fn for t in tensors if t.requires_grad]
    return {id(root): root for root in roots}


def leads_to(args: Iterable[Any], roots: dict[int, object], limit: int = 2000) -> bool:
    """Whether the autograd graph behind some tensors reaches one of the roots, within so many nodes."""
    if any(id(value) in roots for value in args):
        return True
    waiting: list[Any] = [a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None]
    seen: dict[int, object] = {}  # holds the nodes, or their ids would be given away again
    while waiting and len(seen) < limit:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if id(node) in roots or id(getattr(node, "variable", None)) in roots:
            return True
        waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False
