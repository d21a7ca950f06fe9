"""What the autograd graph of a region tells: where it begins, compiled code in it, attention that no op showed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from fastac import opaque, torch_internals
from fastac.recognition import says_attention


def tensors_of(value: Any) -> Iterable[torch.Tensor]:
    """Every tensor in nested inputs."""
    return [leaf for leaf in torch_internals.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


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
    return any(node.name() == torch_internals.COMPILED_NODE for node in nodes)


def hidden_functions(nodes: Iterable[Any], recorded: int) -> list[type]:
    """The autograd.Functions among these nodes whose names say attention, when fewer attention calls were recorded.

    Each attention that autograd knows is at least one call that is recorded; what is missing is a kernel that its
    Function calls past the dispatcher.
    """
    attention = [node for node in nodes if _says_attention(node.name())]
    if len(attention) <= recorded:
        return []
    functions = [torch_internals.function_of(node) for node in attention]
    return list(dict.fromkeys(cls for cls in functions if cls is not None and not opaque.is_visible(cls)))


def parameters_cut_off(module: torch.nn.Module | None, nodes: Iterable[Any]) -> list[str]:
    """Names of a block's attention parameters that require grad and have no part in its outputs.

    Behind a kernel without a backward gradients are None, and nobody is told: SageAttention does that.
    """
    if module is None:
        return []
    reached = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    parameters = [(name, parameter) for name, parameter in named if says_attention(name.rpartition(".")[0])]
    cut_off = [name for name, parameter in parameters if id(parameter) not in reached]
    return cut_off if len(cut_off) < len(parameters) else []  # all of them: frozen inputs, or another path was taken


def _says_attention(node_name: str) -> bool:
    own = re.sub(r"Backward\d*$", "", node_name)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", own)
    return says_attention(words)


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
