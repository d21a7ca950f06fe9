"""Reads the autograd graph of a region: attention that no op shows, and attention parameters that get no gradient."""

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


def leads_to(values: Iterable[Any], roots: Iterable[torch.Tensor]) -> bool:
    """Whether the autograd graph behind some values reaches one of the roots."""
    values = list(values)
    nodes = nodes_between(values, ())  # held, or their ids would be given away again
    reached = set(map(id, values + nodes)) | {id(getattr(node, "variable", None)) for node in nodes}
    return any(id(root if root.grad_fn is None else root.grad_fn) in reached for root in roots if root.requires_grad)


def hidden_functions(nodes: Sequence[Any], owners: Iterable[int], policy: Policy) -> list[type]:
    """The autograd.Functions among these nodes that look like an attention the policy saves, and recorded no call.

    owners: for each recorded attention call, the node that was the newest when it was made. In the forward of a
    Function that is its own node, or one of a graph inside it, of which none is among these nodes.
    """
    numbers = sorted(map(torch_private.sequence_number, nodes))
    recorded = {numbers[bisect.bisect_right(numbers, owner) - 1] for owner in owners if numbers}
    found = []
    for node in nodes:
        function = torch_private.function_of(node)
        if function is not None and torch_private.sequence_number(node) not in recorded:
            keys = _keys_of_attention(node) or (sys.maxsize if opaque.is_visible(function) else 0)
            if keys and policy.saves(keys):
                found.append(function)
    return found


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
    """The name of a node with underscores between its words."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)


def _keys_of_attention(node: Any) -> int:
    """The number of keys of the attention that a node looks like, by its name and inputs; 0 if it looks like none."""
    shapes = torch_private.input_shapes(node)
    known = [shape for shape in shapes if shape is not None and 3 <= len(shape) <= 5]
    if not names_attention_kernel(_words(node)) or len(shapes) < 3 or not known:
        return 0
    key = shapes[1] if shapes[1] in known else None
    return max(key[1:-1] if key is not None else [size for shape in known for size in shape[:-1]])


def parameters_cut_off(module: torch.nn.Module | None, nodes: Iterable[Any]) -> list[str]:
    """Names of a block's attention parameters that require grad and that its outputs do not depend on.

    A kernel without a backward (SageAttention) does that: gradients before it are None, without an error.
    """
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    named = module.named_parameters() if module is not None else ()
    parameters = [(name, one) for name, one in named if one.requires_grad and says_attention(name.rpartition(".")[0])]
    # A DTensor is FSDP's shard, which replaced the parameter that was used.
    cut_off = [name for name, one in parameters if id(one) not in reached and not hasattr(one, "to_local")]
    return cut_off if len(cut_off) < len(parameters) else []  # all of them: frozen inputs, or another path was taken
