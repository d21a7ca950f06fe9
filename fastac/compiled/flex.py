"""flex_attention in compiled code: inductor compiles its kernel apart, and calls it as an op that the tape sees.

The graph does not break: the call is put into the graph that AOT made. The op returns the outputs of the kernel: the
output and the statistics that the backward needs. The backward, and the code around both, is compiled as without
fastac. A call costs one Python function, and whatever inductor would have fused into the kernel beside score_mod and
mask.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastac.compiled import torch_private
from fastac.compiled.torch_private import FLEX_ATTENTION

INDUCTOR = "inductor"

_library = torch.library.Library("fastac_compiled", "DEF")
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] others, SymInt[] sizes, int kernel)"
    " -> (Tensor, Tensor, Tensor)",
    # Not in a CUDA graph, where a call would not be seen a second time.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe),
)


class _Kernel(NamedTuple):
    """One compiled call."""

    graph: torch.fx.GraphModule
    run: Callable[[list[Any]], Sequence[Any]]
    used: tuple[int, ...]
    """Which of the three outputs are used in the graph that calls it."""


_kernels: dict[int, _Kernel] = {}  # never freed: code that calls a kernel may be anywhere
_numbers = itertools.count()


def _call(on_fakes: bool, *given: Any) -> tuple[torch.Tensor, ...]:
    """Run a compiled call, or trace it on fake tensors. given: as the schema has them."""
    query, key, value, others, sizes, kernel = given
    found = _kernels[kernel]
    inputs = [query, key, value, *others, *sizes]
    return _all_three(found, query, found.graph(*inputs) if on_fakes else found.run(inputs))


def _all_three(kernel: _Kernel, like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The three outputs; those that are not used are empty."""
    remaining = iter(outputs)
    return tuple([next(remaining) if place in kernel.used else like.new_empty(0) for place in range(3)])


_library.impl("flex_attention", functools.partial(_call, False), "CompositeExplicitAutograd")
torch.library.register_fake("fastac_compiled::flex_attention", functools.partial(_call, True), lib=_library)

OP = torch.ops.fastac_compiled.flex_attention.default


def set_apart(graph: torch.fx.Graph) -> None:
    """Compile every flex_attention of a graph by itself, and put a call of the op in its place.

    graph: one of inductor's, after AOT, with the example values of its nodes.
    """
    owner: Any = graph.owning_module
    for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
        used = tuple(sorted({int(user.args[1]) for user in node.users}))
        part, tensors, sizes = part_of(owner, node, used)
        run = torch_private.compile_graph(part, [given.meta["val"] for given in (*tensors, *sizes)])
        number = next(_numbers)
        _kernels[number] = _Kernel(part, run, used)
        with graph.inserting_before(node):
            call = graph.call_function(OP, (*tensors[:3], tensors[3:], sizes, number))
        values = node.meta["val"]
        call.meta["val"] = _all_three(_kernels[number], values[0], [values[place] for place in used])
        inputs = node.all_input_nodes
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        for given in inputs:
            if given.op == "get_attr" and not given.users:
                graph.erase_node(given)


def part_of(
    owner: torch.nn.Module, node: torch.fx.Node, used: Sequence[int]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[torch.fx.Node]]:
    """A graph of one call alone, and its inputs: tensors (query, key and value first), and sizes."""
    root, graph = torch.nn.Module(), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    first: list[Any] = list(node.args[:3])
    modules = [given for given in node.all_input_nodes if isinstance(_attribute(owner, given), torch.nn.Module)]
    others = [given for given in node.all_input_nodes if given not in first and given not in modules]
    sizes = [given for given in others if not isinstance(given.meta["val"], torch.Tensor)]
    tensors = first + [given for given in others if given not in sizes]
    for place, given in enumerate((*tensors, *sizes)):
        copies[given] = graph.placeholder(f"given_{place}")
        copies[given].meta["val"] = given.meta["val"]
    for given in modules:
        name = str(given.target).replace(".", "_")
        root.add_module(name, _attribute(owner, given))
        copies[given] = graph.get_attr(name)
    call = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([graph.call_function(operator.getitem, (call, place)) for place in used]))
    return torch.fx.GraphModule(root, graph), tensors, sizes


def _attribute(owner: torch.nn.Module, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(owner) if node.op == "get_attr" else None
