"""The decisions that AOT was told while it traced regions, by compilation, for `fastac.report`.

A region in a graph cannot be seen while it runs. So the decisions are noted while AOT traces.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.compiled import torch_private
from fastac.engine import torch_private as engine_private
from fastac.engine.process import process
from fastac.engine.results import Call
from fastac.engine.torch_private import compilations
from fastac.errors import class_name
from fastac.policy import Policy
from fastac.registry import BoundOp


class TracedCall(NamedTuple):
    """One attention call in a region that AOT traced."""

    # So many compilations had begun by then.
    compilation: int
    policy: Policy
    call: Call
    # The modules around the call, outer first: the part of the name that is known, and the class.
    modules: tuple[tuple[str, str], ...]


def traced_call(policy: Policy, op: BoundOp, keys: Any, saved: bool, outputs: Any) -> TracedCall:
    """The decision about a call that is being traced."""
    tensors = [value for value in engine_private.tree_leaves(outputs) if saved and isinstance(value, torch.Tensor)]
    size = sum(_hint(tensor.numel()) * tensor.element_size() for tensor in tensors)
    return TracedCall(compilations.count, policy, Call(op.name, _hint(keys), saved, size), _modules_here())


def _traced() -> dict[str, list[TracedCall]]:
    """Calls in regions, by the id of their compilation; since dynamo was reset, as it gives the same ids again then."""
    compilations.so_far()
    if process.dynamo_resets != compilations.resets:
        process.dynamo_resets = compilations.resets
        process.traced.clear()
    return process.traced


def note_region() -> list[TracedCall]:
    """The list for the calls of the compilation in this thread, which has a region. AOT may use a cached graph."""
    name = torch_private.compile_id()
    return [] if name is None else _traced().setdefault(name, [])


def has_regions(nodes: Sequence[Any]) -> bool:
    """Whether the compiled graphs among these autograd nodes have regions.

    Without nodes, or with graphs of a torch before 2.12, which do not tell their ids: whether any graph has.
    """
    traced = _traced()
    return bool(traced) and (not nodes or not ids_among(nodes).isdisjoint([*traced, "unknown"]))


def ids_among(nodes: Iterable[Any]) -> set[str]:
    """The ids of the compilations that made the graphs among these autograd nodes."""
    return set(map(torch_private.compile_id_of, filter(None, map(torch_private.compiled_function, nodes))))


def decided(
    blocks: Mapping[str, tuple[str, Policy | None, int]], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """Block name -> the decisions about its calls in its latest trace; blocks that were not traced are missing.

    blocks: name -> class, policy, and a number of compilations: traces of these are ignored, because something newer is
    known of the block. ids: the compilations that count; by default all. A graph knows only class, name and policy of a
    block. So two models of one class are distinguished only by the ids.
    """
    decisions: dict[str, list[Call]] = {}
    for compile_id, traced_calls in _traced().copy().items():
        calls: dict[str, list[Call]] = collections.defaultdict(list)
        for traced in traced_calls if ids is None or compile_id in ids else ():
            # Dynamo's paths end with the block's name, and begin wherever the compiled code does.
            names = [
                name
                for name, (block_class, policy, since) in blocks.items()
                if policy == traced.policy
                and traced.compilation > since
                and any(cls == block_class and f".{path}".endswith(f".{name}") for path, cls in traced.modules)
            ]
            if names:
                calls[max(names, key=len)].append(traced.call)
        decisions.update(calls)
    return decisions


def _modules_here() -> tuple[tuple[str, str], ...]:
    """The modules around the op that is being traced: name and class, as dynamo noted them."""
    stack = torch_private.module_stack()
    return tuple((".".join(_NAMES.findall(path)), class_name(cls)) for path, cls in stack if isinstance(cls, type))


_NOT_NAMES = r"(?!_modules\b|__dict__|_orig_mod\b|_checkpoint_wrapped_module\b)"
_NAMES = re.compile(rf"(?<=\['){_NOT_NAMES}(?!self'|fn')\w+(?='\])|(?<=\.){_NOT_NAMES}\w+")
"""Finds the parts of a name in a path, for instance L['self'].__dict__['_modules']['blocks'].0.attn1"""


def _hint(value: Any) -> int:
    """A number; for a symbolic one its value in the trace."""
    return value if isinstance(value, int) else int(value.node.hint or 0)
