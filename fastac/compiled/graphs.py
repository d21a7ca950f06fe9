"""Graphs that torch.compile made: the saves that AOT was asked for, and whether their backward runs attention again.

A region in a graph cannot be seen while it runs. So `TracedRegions` notes the decisions while AOT traces, for
`fastac.report`. The compiler may still run a saved attention again: under a memory budget, with a partitioner of the
user's, or in a graph from a cache. A listener sees that when it happens, in the graph's backward, and raises an error.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compiled import torch_private
from fastac.engine import torch_private as engine_private
from fastac.engine.process import process, thread
from fastac.engine.results import Call
from fastac.engine.torch_private import compilations
from fastac.errors import PolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import BoundOp, classify

# A private name, but the interface between torch's checkpointing and its partitioners since pytorch 103357.
TAG = "recompute"
"""Key of `node.meta` in which torch's partitioners look for the decision about a node."""


def is_attention(node: torch.fx.Node) -> bool:
    """Whether a node runs an attention forward, by the rows of the registry."""
    bound = classify(node.target)
    return bound is not None and bound.is_attention


def is_recomputed(node: torch.fx.Node) -> bool:
    """Whether a node is tagged to run again in backward."""
    return node.meta.get(TAG) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One attention call in a region that AOT traced."""

    policy: Policy
    call: Call
    modules: tuple[tuple[str, str], ...]
    """The modules around the call, outer first: the part of the name that is known, and the class."""


@dataclasses.dataclass
class TracedRegions:
    """The regions of one compilation."""

    time: int = 0
    """When it was compiled, as `time` counts."""
    policies: set[Policy] = dataclasses.field(default_factory=set)
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    graphs: list[torch.fx.Graph] = dataclasses.field(default_factory=list)
    """Joint graphs of AOT that are not counted yet."""
    saved: set[str] = dataclasses.field(default_factory=set)
    """Names of those nodes of these graphs that AOT was told to save."""
    may_run: int = 0
    """How many attention calls the backward may run: those that AOT was told to recompute (also in checkpoints that are
    not fastac's), and those of the backward itself."""
    has_nested: bool = False
    """Some graph calls a nested_compile_region, in which AOT saves as it likes."""

    def add(self, policy: Policy, op: BoundOp, keys: Any, saved: bool, outputs: Any) -> None:
        """Note the decision about a call that is being traced."""
        tensors = [value for value in engine_private.tree_leaves(outputs) if saved and isinstance(value, torch.Tensor)]
        size = sum(_hint(tensor.numel()) * tensor.element_size() for tensor in tensors)
        self.calls.append(TracedCall(policy, Call(op.name, _hint(keys), saved, size), _modules_here()))

    def leave(self) -> None:
        """Note the tags of a region that was traced: a partitioner may change them later."""
        nodes = [node for graph in self.graphs for node in filter(is_attention, graph.nodes)]
        self.saved |= {node.name for node in nodes if node.meta.get(TAG) is CheckpointPolicy.MUST_SAVE}

    def count(self) -> None:
        """Count the calls that the backward may run, now that the graphs are complete, and drop the graphs."""
        while self.graphs:
            graph = self.graphs.pop()
            self.has_nested |= any(node.target is torch_private.NESTED_REGION for node in graph.nodes)
            for node in filter(is_attention, graph.nodes):
                runs_in_backward = is_recomputed(node) or torch_private.is_of_backward(node)
                self.may_run += runs_in_backward and node.name not in self.saved


def _traced() -> dict[str, TracedRegions]:
    """Regions by the id of their compilation, since the last reset of dynamo, which gives the same ids again."""
    compilations.look()
    if process.dynamo_resets != compilations.resets:
        process.dynamo_resets = compilations.resets
        process.traced.clear()
        process.budget = 1.0
    return process.traced


time = compilations.look
"""A number that grows with every compilation. If it has grown, a region may call other code. 0 without dynamo."""


def note_region() -> TracedRegions:
    """Note that dynamo's graph has a region. Works also if AOT takes the graph from its cache and traces nothing."""
    name = torch_private.compile_id()
    return TracedRegions() if name is None else _traced().setdefault(name, TracedRegions(compilations.count))


def hold_regions(nodes: Sequence[Any]) -> bool:
    """Whether the compiled graphs among these autograd nodes have regions.

    Without nodes, or with graphs of a torch before 2.12, which do not tell their ids: whether any graph has.
    """
    traced = _traced()
    return bool(traced) and (not nodes or not ids_among(nodes).isdisjoint([*traced, "unknown"]))


def region(policy: Policy) -> TracedRegions:
    """Begin to note a region that AOT traces in this thread."""
    traced = note_region()
    for other in _traced().values():
        if other is not traced:
            other.count()  # dynamo compiles one thing at a time: these are complete
    graph = torch_private.graph_being_traced()
    if graph is not None and not any(graph is listed for listed in traced.graphs):
        traced.graphs.append(graph)
    traced.policies.add(policy)
    _watch_backward()
    return traced


def watch(nodes: Iterable[Any], policy: Policy) -> None:
    """Raise, in backward, if compiled graphs among a region's autograd nodes run a saved attention again."""
    for function in filter(None, map(torch_private.compiled_function, nodes)):
        process.graphs.setdefault(function, set()).add(policy)
        _watch_backward()


def ids_among(nodes: Iterable[Any]) -> set[str]:
    """The ids of the compilations that made the graphs among these autograd nodes."""
    return set(map(torch_private.compile_id_of, filter(None, map(torch_private.compiled_function, nodes))))


def _watch_backward() -> None:
    _traced()
    process.budget = min(process.budget, engine_private.memory_budget())
    if ran_again not in process.listeners:
        process.listeners.append(ran_again)


def ran_again(op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Listener: an attention kernel is about to run while no region is open."""
    if not engine_private.in_backward() or not op.is_attention or engine_private.is_abstract(args):
        return
    running = engine_private.running_node()
    function = torch_private.compiled_function(running)
    # A checkpoint around the graph runs its forward again in a backward, as it should.
    if function is None or engine_private.in_recompute():
        return
    policies, allowed = _known_of(function)
    keys = op.keys(args, kwargs)
    policy = next((policy for policy in policies if policy.saves(keys)), None)
    if policy is None:
        return
    # The count begins anew with every run of a graph's backward: two layers may share a graph, and a backward may run
    # twice.
    backward = function, engine_private.sequence_number(running), engine_private.running_backward()
    if thread.graph_backward != backward:
        thread.graph_backward, thread.ran_again = backward, 0
    thread.ran_again += 1
    if thread.ran_again > allowed:
        raise PolicyNotAppliedError(
            f"{policy}: {op.name} over {keys} keys ran again in the backward of a graph that torch.compile made "
            f"(compilation {torch_private.compile_id_of(function)}): the compiler did not keep what the policy saves.\n"
            f"{_why(function)}"
        )


def _why(function: type) -> str:
    """Sentences on why a graph's backward runs attention again, and what to do."""
    traced = _traced().get(torch_private.compile_id_of(function))
    if traced is not None and traced.has_nested:
        return (
            "It holds a torch.compiler.nested_compile_region, and the compiler saves what it likes in there. Use "
            "fastac.compile(model) in the place of torch.compile around it, or leave the nested region out."
        )
    _watch_backward()  # the budget may have been lowered since the graph was traced
    cause = "torch._functorch.config.activation_memory_budget below 1 does that, a partitioner of your own, or a graph "
    cause += "from torch's cache that was made under either. Remove it"
    if process.budget < 1:
        cause = f"torch._functorch.config.activation_memory_budget is, or was, {process.budget:g}. Set it to 1"
    return f"{cause}, call torch._dynamo.reset(), and train once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."


def _known_of(function: type) -> tuple[Iterable[Policy], int]:
    """The policies of the regions in or around a graph, and how many attention calls its backward may run."""
    # A graph inside an eager region: the tape saves its attention, and its backward needs none.
    watched = process.graphs.get(function)
    if watched is not None:
        return watched, 0
    traced = _traced().get(torch_private.compile_id_of(function), TracedRegions())
    traced.count()
    return traced.policies, traced.may_run


def decided(
    blocks: Mapping[str, tuple[str, Policy | None, int]], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """Block name -> the decisions about its calls in its latest trace; blocks that were not traced are missing.

    blocks: name -> class, policy, and the time since which something newer is known of the block: traces before that
    are ignored. ids: the compilations that count; by default all. A graph knows only class, name and policy of a block.
    So two models of one class are distinguished only by the ids.
    """
    decisions: dict[str, list[Call]] = {}
    for compile_id, traced in _traced().copy().items():
        calls: dict[str, list[Call]] = collections.defaultdict(list)
        for traced_call in traced.calls if ids is None or compile_id in ids else ():
            # Dynamo's paths end with the block's name, and begin wherever the compiled code does.
            names = [
                name
                for name, (block_class, policy, since) in blocks.items()
                if policy == traced_call.policy
                and traced.time > since
                and any(cls == block_class and f".{path}".endswith(f".{name}") for path, cls in traced_call.modules)
            ]
            if names:
                calls[max(names, key=len)].append(traced_call.call)
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
