"""Graphs that torch.compile made: what AOT was asked to save in them, and whether their backward runs attention again.

Nothing of a region in a graph is seen while it runs, so what was decided is noted while AOT traces (`Traced`), for
`fastac.report`. What the compiler makes of it is its own: a memory budget, a partitioner of the user's or a graph
from a cache may run a saved attention again. That is seen when it happens, in the graph's backward, and is an error.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fastac.compile import torch_private
from fastac.compile.torch_private import compilations
from fastac.engine import torch_private as engine_private
from fastac.engine.calls import Call
from fastac.engine.tape import engine
from fastac.errors import PolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import BoundOp, classify

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One attention call in a region that AOT traced. modules: name, as far as it is known, and class, outer first."""

    policy: Policy
    call: Call
    modules: tuple[tuple[str, str], ...]


@dataclasses.dataclass
class Traced:
    """The regions of one compilation. time: of it, as `time` counts.

    graphs: joint graphs of AOT's, until they are counted; saved: names of their nodes that AOT was asked to save.
    may_run: attention calls that backward may run: those that AOT was asked to recompute, in regions of others as well,
    and those that are of the backward themselves.
    """

    time: int = 0
    policies: set[Policy] = dataclasses.field(default_factory=set)
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    graphs: list[torch.fx.Graph] = dataclasses.field(default_factory=list)
    saved: set[str] = dataclasses.field(default_factory=set)
    may_run: int = 0

    def add(self, policy: Policy, op: BoundOp, keys: Any, saved: bool, outputs: Any) -> None:
        """Note what was decided for a call that is being traced."""
        held = sum(_bytes_of(value) for value in engine_private.tree_leaves(outputs)) if saved else 0
        self.calls.append(TracedCall(policy, Call(op.name, _hint(keys), saved, held), _modules_here()))

    def leave(self) -> None:
        """A region was traced: its nodes have their tags, which a partitioner may change later on."""
        for graph in self.graphs:
            self.saved.update(
                n.name for n in _attention(graph) if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
            )

    def count(self) -> None:
        """Count what the backward may run, now that the graphs are complete, and let go of them."""
        while self.graphs:
            for node in _attention(self.graphs.pop()):
                again = node.meta.get("recompute") in _RECOMPUTED or torch_private.is_of_backward(node)
                self.may_run += again and node.name not in self.saved


def _attention(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    for node in graph.nodes:
        op = classify(node.target) if node.op == "call_function" else None
        if op is not None and op.is_attention:
            yield node


class _Backward(threading.local):
    """The backward of a graph that runs in this thread: what was run again in it so far."""

    node: object = None
    again: int = 0


class _State:
    """What is known in this process. traced: by the id of a compilation. watched: graphs called inside regions."""

    def __init__(self) -> None:
        self.traced: dict[str, Traced] = {}  # other threads add to it
        self.watched: weakref.WeakKeyDictionary[type, set[Policy]] = weakref.WeakKeyDictionary()
        self.resets = 0
        self.backward = _Backward()

    def here(self) -> dict[str, Traced]:
        """Traced regions, without those of before a reset of dynamo, whose ids are given anew."""
        compilations.look()
        if self.resets != compilations.resets:
            self.resets = compilations.resets
            self.traced.clear()
        return self.traced


_state = _State()

time = compilations.look
"""A number that changes with every compilation: what a region calls may be other code since. 0 without dynamo."""


def reset() -> None:
    """Forget every graph, for tests."""
    _state.traced.clear()
    _state.watched.clear()
    if _ran_again in engine.listeners:
        engine.listeners.remove(_ran_again)


def note_region() -> None:
    """A region is in what dynamo compiles now, also where AOT takes the graph from its cache and traces nothing."""
    if (name := torch_private.compile_id()) is not None:
        _state.here().setdefault(name, Traced(compilations.count))


def hold_regions(nodes: Sequence[Any]) -> bool:
    """Whether there are regions in the graphs among these autograd nodes. Without any, there may be."""
    traced = _state.here()
    return bool(traced) and (not nodes or not ids_among(nodes).isdisjoint(traced))


def region(policy: Policy) -> Traced:
    """A region is about to be traced by AOT, in this thread."""
    known, name = _state.here(), torch_private.compile_id()
    traced = Traced() if name is None else known.setdefault(name, Traced(compilations.count))
    for other in known.values():
        if other is not traced:
            other.count()  # dynamo compiles one thing at a time: these are complete
    graph = torch_private.graph_being_traced()
    if graph is not None and not any(graph is one for one in traced.graphs):
        traced.graphs.append(graph)
    traced.policies.add(policy)
    _watch_backward()
    return traced


def watch(nodes: Iterable[Any], policy: Policy) -> None:
    """See to it that compiled graphs among a region's autograd nodes do not run a saved attention again."""
    for function in filter(None, map(torch_private.compiled_function, nodes)):
        _state.watched.setdefault(function, set()).add(policy)
        _watch_backward()


def ids_among(nodes: Iterable[Any]) -> set[str]:
    """The ids that the graphs which some of these autograd nodes stand for were compiled under."""
    return set(map(torch_private.compile_id_of, filter(None, map(torch_private.compiled_function, nodes))))


def _watch_backward() -> None:
    if _ran_again not in engine.listeners:
        engine.listeners.append(_ran_again)


def _ran_again(op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An attention kernel is about to run where no region is open."""
    if not engine_private.in_backward() or not op.is_attention or engine_private.is_abstract(args):
        return
    running = engine_private.running_node()
    function = torch_private.compiled_function(running)
    if function is None or engine_private.in_recompute():
        return
    policies, allowed = _known_of(function)
    keys = op.keys(args, kwargs)
    policy = next((policy for policy in policies if policy.saves(keys)), None)
    if policy is None:
        return
    backward = _state.backward
    node = function, engine_private.sequence_number(running), engine_private.running_backward()
    if backward.node != node:
        backward.node, backward.again = node, 0
    backward.again += 1
    if backward.again > allowed:
        raise PolicyNotAppliedError(
            f"{policy}: {op.name} over {keys} keys ran again in the backward of a graph that torch.compile made "
            f"(compilation {torch_private.compile_id_of(function)}): the compiler did not keep what the policy saves. "
            f"torch._functorch.config.activation_memory_budget below 1 does that, a partitioner of your own, or a "
            f"graph from torch's cache that was made under either. Take it away, call torch._dynamo.reset(), and train "
            f"once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
        )


def _known_of(function: type) -> tuple[Iterable[Policy], int]:
    """The policies of the regions in or around a graph, and how many attention calls its backward may run."""
    watched = _state.watched.get(function)
    if watched is not None:
        return watched, 0
    traced = _state.here().get(torch_private.compile_id_of(function))
    if traced is None:
        return (), 0
    traced.count()
    return traced.policies, traced.may_run


def decided(
    blocks: Mapping[str, tuple[str, Policy | None, int]], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """For each block, by name, what was decided for its calls when it was traced last; nothing where it was not.

    blocks: class, policy, and since when what is known of the block otherwise; a trace before that does not count. A
    block's class, name and policy tell it from others: a graph knows no more of it, so that two models of one class are
    not told apart, but by ids, which compilations count.
    """
    found: dict[str, list[Call]] = {}
    for traced in [traced for name, traced in _state.here().copy().items() if ids is None or name in ids]:
        mine: dict[str, list[Call]] = collections.defaultdict(list)
        for call in traced.calls:
            paths = {(f".{name}", class_name) for name, class_name in call.modules}
            names = [
                name
                for name, (block_class, policy, since) in blocks.items()
                if policy == call.policy
                and traced.time > since
                and any(kind == block_class and path.endswith(f".{name}") for path, kind in paths)
            ]
            if names:
                mine[max(names, key=len)].append(call.call)
        found.update(mine)
    return found


def _modules_here() -> tuple[tuple[str, str], ...]:
    """The modules that the op being traced is called in, from what dynamo noted of it."""
    stack = torch_private.module_stack()
    return tuple((".".join(_NAMES.findall(path)), class_name(kind)) for path, kind in stack if isinstance(kind, type))


_NOT_NAMES = r"(?!_modules\b|__dict__|_orig_mod\b|_checkpoint_wrapped_module\b)"
_NAMES = re.compile(rf"(?<=\['){_NOT_NAMES}(?!self'|fn')\w+(?='\])|(?<=\.){_NOT_NAMES}\w+")
"""The parts of a name in a path such as L['self'].__dict__['_modules']['blocks'].0.attn1"""


def _hint(value: Any) -> int:
    return value if isinstance(value, int) else int(value.node.hint or 0)


def _bytes_of(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= _hint(size)
    return count
