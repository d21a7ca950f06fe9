"""flex_attention that trains on a CPU, in eager mode, and counts its executions.

On a CPU it refuses inputs that require grad, as inductor has no backward for it there. Its eager math implementation
has one; so the refusal is taken out, and nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.attention.flex_attention as flex
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastac.compiled import flex as compiled_flex
from fastac.compiled import torch_private
from tests import support

OP = "higher_order::flex_attention"

_op = torch.ops.higher_order.flex_attention
_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd


@contextmanager
def registered() -> Iterator[None]:
    """Inside, the math implementation counts itself in `support.executions`; not when it is traced."""
    kernel = _op.py_kernels[_EAGER]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack() and not isinstance(args[0], torch._subclasses.FakeTensor):
            support.executions[OP] += 1
        return kernel(*args, **kwargs)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "_validate_device", lambda query, key, value: None)
            patch.setitem(_op.py_kernels, _EAGER, counted)
            _op._dispatch_cache.clear()
            yield
    finally:
        _op._dispatch_cache.clear()


COMPILED_OP = "fastac_compiled::flex_attention"

_BACKWARD = torch.ops.higher_order.flex_attention_backward
_LN2 = math.log(2)
_library = torch.library.Library("fastac_tests_flex", "DEF")
_library.define("part(Tensor[] tensors, SymInt[] sizes, int number) -> (Tensor, Tensor, Tensor)")
_parts: list[torch.fx.GraphModule] = []


def _indices(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    sizes = (*query.shape[:3], key.shape[2])
    return [torch.arange(n).reshape([-1 if i == place else 1 for i in range(4)]) for place, n in enumerate(sizes)]


def _like(tensor: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    order = sorted(range(4), key=lambda place: -layout.stride(place))
    return tensor.permute(order).contiguous().permute([order.index(place) for place in range(4)])


def _forward_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    _: Any,
    of_score_mod: Any = (),
    of_mask_mod: Any = (),
) -> tuple[torch.Tensor, ...]:
    """flex_attention, its modifications called once, on all scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    indices = _indices(query, key)
    scores = score_mod((query @ key.transpose(-1, -2)).float() * scale, *indices, *of_score_mod)
    scores = scores.masked_fill(~block_mask[-1](*indices, *of_mask_mod), -torch.inf)
    statistics = scores.logsumexp(-1)
    output = (scores - statistics[..., None]).exp() @ value.float()
    return _like(output.to(query.dtype), query), statistics / _LN2, scores.amax(-1)


def _backward_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    grad_statistics: torch.Tensor | None,
    score_mod: Any,
    joint: Any,
    block_mask: Any,
    scale: float,
    _: Any,
    of_score_mod: Any = (),
    of_mask_mod: Any = (),
) -> tuple[torch.Tensor, ...]:
    """Its backward, from the saved output and statistics: one that is wrong shows."""
    of_kv = (key.shape[0], key.shape[1], -1, *key.shape[2:])
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(groups, 1).float() for t in (key, value))
    indices = _indices(query, keys)
    scores = (query.float() @ keys.transpose(-1, -2)) * scale
    kept = block_mask[-1](*indices, *of_mask_mod)
    modified = score_mod(scores, *indices, *of_score_mod).masked_fill(~kept, -torch.inf)
    shares = (modified - statistics[..., None] * _LN2).exp()
    change = grad.float() @ values.transpose(-1, -2) - (grad.float() * output.float()).sum(-1, keepdim=True)
    if grad_statistics is not None:
        change = change + grad_statistics[..., None] / _LN2
    of_scores = joint(scores, *indices, shares * change, *of_score_mod)[0] * scale
    of_keys = (of_scores.transpose(-1, -2) @ query.float()).reshape(of_kv).sum(2)
    of_values = (shares.transpose(-1, -2) @ grad.float()).reshape(of_kv).sum(2)
    pairs = ((of_scores @ keys, query), (of_keys, key), (of_values, value))
    return tuple(_like(found.to(of.dtype), of) for found, of in pairs)


def _in_math(part: torch.fx.GraphModule, kernel: Callable[..., Any]) -> torch.fx.GraphModule:
    copied = torch.fx.GraphModule(part, copy.copy(part.graph))
    for target in (torch_private.FLEX_ATTENTION, _BACKWARD):
        for node in copied.graph.find_nodes(op="call_function", target=target):
            node.target = kernel
    copied.recompile()
    return copied


def _run(tensors: list[torch.Tensor], sizes: list[Any], number: int) -> Any:
    return _parts[number](*tensors, *sizes)


_library.impl("part", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fastac_tests_flex::part", _run, lib=_library)


def _apart(graph: torch.fx.Graph, target: Any, kernel: Callable[..., Any]) -> None:
    for node in graph.find_nodes(op="call_function", target=target):
        part, tensors, sizes = compiled_flex.part_of(graph.owning_module, node, (0, 1, 2))
        _parts.append(_in_math(part, kernel))
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.fastac_tests_flex.part.default, (tensors, sizes, len(_parts) - 1))
        call.meta["val"] = node.meta["val"][:3]
        node.replace_all_uses_with(call)
        graph.erase_node(node)


class _BackwardApart(CustomGraphPass):
    """What fastac does with the forward, done with the backward, which inductor cannot make for a CPU."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        _apart(graph, _BACKWARD, _backward_math)

    def uuid(self) -> str:
        """Without it, inductor would put nothing into its cache, whatever fastac's own pass says."""
        return "backward apart"


backward_apart = _BackwardApart()


def _forward_hidden(graph: torch.fx.Graph) -> None:
    _apart(graph, torch_private.FLEX_ATTENTION, _forward_math)


HIDDEN = {"post_grad_custom_pre_pass": [_forward_hidden, backward_apart]}
"""Options for torch.compile that hide flex_attention, as inductor's own kernels do."""


@contextmanager
def compiled() -> Iterator[None]:
    """Inside, inductor compiles what surrounds flex_attention; the kernels themselves are plain math.

    Their executions are counted in `support.executions[COMPILED_OP]`.
    """

    def counted(part: torch.fx.GraphModule, inputs: Any) -> Any:
        kernel = _in_math(part, _forward_math)

        def run(given: list[Any]) -> Any:
            support.executions[COMPILED_OP] += 1
            return kernel(*given)

        return run

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(post_grad_custom_pre_pass=backward_apart):
        patch.setattr(flex, "_validate_device", lambda query, key, value: None)
        patch.setattr(torch_private, "compile_graph", counted)
        yield
