"""flex_attention that trains on a CPU, in eager mode, and counts its executions.

On a CPU it refuses inputs that require grad, as inductor has no backward for it there. Its eager math implementation
has one; so the refusal is taken out, and nothing else.
"""

from __future__ import annotations

import copy
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
_library = torch.library.Library("fastac_tests_flex", "DEF")
_library.define("part(Tensor[] tensors, SymInt[] sizes, int number) -> (Tensor, Tensor, Tensor)")
_parts: list[torch.fx.GraphModule] = []


def _in_math(part: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same, by the eager implementations. The forward's output and statistics are used by the backward's."""
    copied = torch.fx.GraphModule(part, copy.copy(part.graph))
    for op in (_op, _BACKWARD):
        for node in copied.graph.find_nodes(op="call_function", target=op):
            node.target = lambda *args, op=op: op.py_kernels[_EAGER](*args)
    copied.recompile()
    return copied


def _broadcast(modification: Callable[..., Any], prefix: Any, **_: Any) -> Callable[..., Any]:
    """In the place of a vmap, which the modifications that inductor compiles do not take: a call for all scores."""

    def call(*args: Any) -> Any:
        first = len(prefix)
        indices = [args[first + i].reshape([-1 if i == place else 1 for place in range(4)]) for i in range(4)]
        return modification(*args[:first], *indices, *args[first + 4 :])

    return call


def _run(tensors: list[torch.Tensor], sizes: list[Any], number: int) -> Any:
    return _parts[number](*tensors, *sizes)


_library.impl("part", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fastac_tests_flex::part", _run, lib=_library)


def _apart(graph: torch.fx.Graph, target: Any) -> None:
    for node in graph.find_nodes(op="call_function", target=target):
        part, tensors, sizes = compiled_flex.part_of(graph.owning_module, node, (0, 1, 2))
        _parts.append(_in_math(part))
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.fastac_tests_flex.part.default, (tensors, sizes, len(_parts) - 1))
        call.meta["val"] = node.meta["val"][:3]
        node.replace_all_uses_with(call)
        graph.erase_node(node)


class _BackwardApart(CustomGraphPass):
    """What fastac does with the forward, done with the backward, which inductor cannot make for a CPU."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        _apart(graph, _BACKWARD)

    def uuid(self) -> str:
        """Without it, inductor would put nothing into its cache, whatever fastac's own pass says."""
        return "backward apart"


backward_apart = _BackwardApart()


def _forward_hidden(graph: torch.fx.Graph) -> None:
    _apart(graph, _op)


HIDDEN = {"post_grad_custom_pre_pass": [_forward_hidden, backward_apart]}
"""Options for torch.compile that hide flex_attention, as inductor's own kernels do."""


@contextmanager
def compiled(own_kernels: bool = False) -> Iterator[None]:
    """Inside, inductor compiles what surrounds flex_attention; the kernels themselves are plain math, or its own.

    Their executions are counted in `support.executions[COMPILED_OP]`.
    """
    compile_graph = torch_private.compile_graph

    def counted(part: torch.fx.GraphModule, inputs: Any) -> Any:
        kernel = compile_graph(part, inputs) if own_kernels else _in_math(part)

        def run(given: list[Any]) -> Any:
            support.executions[COMPILED_OP] += 1
            return kernel(given) if own_kernels else kernel(*given)

        return run

    graph_pass = None if own_kernels else backward_apart
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(post_grad_custom_pre_pass=graph_pass):
        patch.setattr(torch_private, "compile_graph", counted)
        if not own_kernels:
            patch.setattr(flex, "_validate_device", lambda query, key, value: None)
            patch.setattr(flex, "_vmap_for_bhqkv", _broadcast)
        yield
