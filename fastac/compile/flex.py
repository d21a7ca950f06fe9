"""flex_attention in compiled code: inductor compiles its kernel apart, and calls it as an op that the tape sees.

No graph breaks for it: the call is put into the graph that AOT made. The op returns what the kernel does, the output
and the statistics that the backward needs. The backward, and what surrounds both, is compiled as without fastac. A call
costs one function of Python's, and what inductor might have fused into the kernel beside score_mod and mask.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastac.compile import torch_private
from fastac.compile.torch_private import FLEX_ATTENTION

NAMESPACE = "fastac_compiled"
INDUCTOR = "inductor"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] others, SymInt[] sizes, int kernel)"
    " -> (Tensor, Tensor, Tensor)",
    # Not in a CUDA graph, where a call would not be seen a second time.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe),
)


class _Kernel(NamedTuple):
    """One compiled call. used: which of the three outputs are used where it stands."""

    graph: torch.fx.GraphModule
    run: Callable[[list[Any]], Sequence[Any]]
    used: tuple[int, ...]


_kernels: dict[int, _Kernel] = {}  # code that calls one may be anywhere, and does not say when it goes
_numbers = itertools.count()


def _compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    sizes: Sequence[int],
    kernel: int,
) -> tuple[torch.Tensor, ...]:
    found = _kernels[kernel]
    return _all_three(found, query, found.run([query, key, value, *others, *sizes]))


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    sizes: Sequence[Any],
    kernel: int,
) -> tuple[torch.Tensor, ...]:
    found = _kernels[kernel]
    return _all_three(found, query, found.graph(query, key, value, *others, *sizes))


def _all_three(kernel: _Kernel, like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs with those that nobody uses, which are empty."""
    remaining = iter(outputs)
    return tuple([next(remaining) if place in kernel.used else like.new_empty(0) for place in range(3)])


_library.impl("flex_attention", _compiled, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::flex_attention", _fake, lib=_library)

OP = torch.ops.fastac_compiled.flex_attention.default


def set_apart(graph: torch.fx.Graph) -> None:
    """Compile every flex_attention of a graph by itself, and put a call of the op in its place.

    graph: of inductor's, after AOT, with the example values of its nodes.
    """
    owner: Any = graph.owning_module
    for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
        used = tuple(sorted({int(user.args[1]) for user in node.users}))
        part, tensors, sizes = part_of(owner, node, used)
        if not all(isinstance(given.meta["val"], (int, torch.SymInt)) for given in sizes):
            continue  # a number that an op takes no list of: the call is left where it is, which a region then refuses
        run = torch_private.compile_graph(part, [given.meta["val"] for given in (*tensors, *sizes)])
        number = next(_numbers)
        _kernels[number] = _Kernel(part, run, used)
        with graph.inserting_before(node):
            call = graph.call_function(OP, (*tensors[:3], tensors[3:], sizes, number))
        values = node.meta["val"]
        call.meta["val"] = _all_three(_kernels[number], values[0], [values[place] for place in used])
        functions = [given for given in node.all_input_nodes if given.op == "get_attr"]
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        for function in functions:
            if not function.users:
                graph.erase_node(function)


def part_of(
    owner: torch.nn.Module, node: torch.fx.Node, used: Sequence[int]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[torch.fx.Node]]:
    """A graph of one call alone, and what it is given: tensors, of which query, key and value are first, and sizes."""
    root, graph = torch.nn.Module(), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    tensors: list[torch.fx.Node] = []
    sizes: list[torch.fx.Node] = []
    for given in dict.fromkeys(_nodes_in((node.args, node.kwargs))):
        path = str(given.target)
        if given.op == "get_attr" and isinstance(value := operator.attrgetter(path)(owner), torch.nn.Module):
            name = path.replace(".", "_")
            root.add_module(name, value)
            copies[given] = graph.get_attr(name)
        else:
            (tensors if isinstance(given.meta["val"], torch.Tensor) else sizes).append(given)
    query_key_value = _nodes_in(node.args[:3])
    tensors = [*query_key_value, *(given for given in tensors if given not in query_key_value)]
    for place, given in enumerate((*tensors, *sizes)):
        copies[given] = graph.placeholder(f"given_{place}")
        copies[given].meta["val"] = given.meta["val"]
    call = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([graph.call_function(operator.getitem, (call, place)) for place in used]))
    # Placeholders come first in a graph of inductor's.
    for first in reversed(graph.find_nodes(op="placeholder")):
        next(iter(graph.nodes)).prepend(first)
    return torch.fx.GraphModule(root, graph), tensors, sizes


def _nodes_in(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(value, found.append)
    return found
