"""flex_attention in compiled code: inductor compiles its kernel by itself, and calls it as an op that the tape sees.

The graph does not break: a pass puts the call into the graph that AOT made. The op returns the outputs of the kernel:
the output and the statistics that the backward needs. The backward, and the code around both, is compiled as without
fastac. A call costs a Python function, and whatever inductor would have fused into the kernel beside score_mod and
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

# torch has no way to save flex_attention in compiled code around which a checkpoint stands (pytorch#159970). With
# wrap_inductor_compiled_regions a policy can save all of the compiled code, but not the attention in it
# (pytorch#175229). Once the attention of compiled code is an op of its own in torch, this module may go.

INDUCTOR = "inductor"

_library = torch.library.Library("fastac_compiled", "DEF")
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] others, SymInt[] sizes, int kernel)"
    " -> (Tensor, Tensor, Tensor)",
    # The kernel was compiled for these strides. And a CUDA graph would run it without a call that the tape could see.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe),
)


class _Kernel(NamedTuple):
    """One compiled call."""

    graph: torch.fx.GraphModule
    run: Callable[[list[Any]], Sequence[Any]]
    used: tuple[int, ...]
    """Which of the three outputs are used in the graph that calls it."""


# Kernels are never freed: code that calls one may be anywhere.
_kernels: dict[int, _Kernel] = {}
_numbers = itertools.count()


def _call(on_fakes: bool, *args: Any) -> tuple[torch.Tensor, ...]:
    """Run a compiled call, or trace it on fake tensors. args: those of the schema."""
    query, key, value, others, sizes, number = args
    kernel = _kernels[number]
    inputs = [query, key, value, *others, *sizes]
    return _all_three(kernel, query, kernel.graph(*inputs) if on_fakes else kernel.run(inputs))


def _all_three(kernel: _Kernel, like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The three outputs. Outputs that are not used are empty."""
    remaining = iter(outputs)
    return tuple([next(remaining) if place in kernel.used else like.new_empty(0) for place in range(3)])


_library.impl("flex_attention", functools.partial(_call, False), "CompositeExplicitAutograd")
torch.library.register_fake("fastac_compiled::flex_attention", functools.partial(_call, True), lib=_library)

OP = torch.ops.fastac_compiled.flex_attention.default


def set_apart(graph: torch.fx.Graph) -> None:
    """Compile every flex_attention of a graph by itself, and put a call of the op in its place.

    graph: a graph of inductor's, after AOT, with the example values of its nodes.
    """
    owner: Any = graph.owning_module
    for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION):
        # Not every graph uses all outputs: the forward of a frozen model has no use for the statistics.
        used = tuple(sorted({int(user.args[1]) for user in node.users}))
        part, tensors, sizes = part_of(owner, node, used)
        run = torch_private.compile_graph(part, [source.meta["val"] for source in (*tensors, *sizes)])
        number = next(_numbers)
        _kernels[number] = _Kernel(part, run, used)
        with graph.inserting_before(node):
            call = graph.call_function(OP, (*tensors[:3], tensors[3:], sizes, number))
        values = node.meta["val"]
        call.meta["val"] = _all_three(_kernels[number], values[0], [values[place] for place in used])
        inputs = node.all_input_nodes
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        # Only the call read the modules of score_mod and mask_mod. The part has them now.
        for source in inputs:
            if source.op == "get_attr" and not source.users:
                graph.erase_node(source)


def part_of(
    owner: torch.nn.Module, node: torch.fx.Node, used: Sequence[int]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[torch.fx.Node]]:
    """A graph of a single call, and its inputs: tensors (query, key and value first), and sizes."""
    root, graph = torch.nn.Module(), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    first: list[Any] = list(node.args[:3])
    modules = [source for source in node.all_input_nodes if isinstance(_attribute(owner, source), torch.nn.Module)]
    others = [source for source in node.all_input_nodes if source not in first and source not in modules]
    sizes = [source for source in others if not isinstance(source.meta["val"], torch.Tensor)]
    tensors = first + [source for source in others if source not in sizes]
    for place, source in enumerate((*tensors, *sizes)):
        copies[source] = graph.placeholder(f"given_{place}")
        copies[source].meta["val"] = source.meta["val"]
    for source in modules:
        name = str(source.target).replace(".", "_")
        root.add_module(name, _attribute(owner, source))
        copies[source] = graph.get_attr(name)
    call = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([graph.call_function(operator.getitem, (call, place)) for place in used]))
    return torch.fx.GraphModule(root, graph), tensors, sizes


def _attribute(owner: torch.nn.Module, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(owner) if node.op == "get_attr" else None
