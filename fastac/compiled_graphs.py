"""Graphs that torch.compile made: what AOT was told to save in them, and whether their backward runs attention again.

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

from fastac import compiler_internals, interception, torch_internals
from fastac.census import Call
from fastac.errors import CompiledPolicyNotAppliedError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.ranks import class_name
from fastac.registry import ResolvedOp, classify

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One attention call in a region that AOT traced. modules: name, as far as it is known, and class, outer first."""

    policy: Policy
    call: Call
    modules: tuple[tuple[str, str], ...]


@dataclasses.dataclass
class Traced:
    """The regions of one compilation. time: of it, as `Compilations` counts.

    graphs: joint graphs of AOT's, until they are complete; saved: names of their nodes that AOT was told to save.
    may_run: attention calls that backward may run: those that AOT was told to recompute, in regions of others as well,
    and those that are of the backward themselves.
    """

    time: int = 0
    policies: set[Policy] = dataclasses.field(default_factory=set)
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    budget: compiler_internals.Budget | None = None
    graphs: list[torch.fx.Graph] = dataclasses.field(default_factory=list)
    saved: set[str] = dataclasses.field(default_factory=set)
    may_run: int = 0

    def add(self, policy: Policy, resolved: ResolvedOp, keys: Any, saved: bool, outputs: Any) -> None:
        """Note what was decided for a call that is being traced."""
        held = sum(_bytes_of(value) for value in torch_internals.tree_leaves(outputs)) if saved else 0
        if saved and torch_internals.in_proxy_trace() and (budget := compiler_internals.memory_budget()).value != 1:
            self.budget = budget
        self.calls.append(TracedCall(policy, Call(resolved.name, _hint(keys), saved, held), _modules_here()))

    def refuse_budget(self, policy: Policy) -> None:
        """Raise PolicyNotAppliedError where AOT would decide by a memory budget what the graph saves."""
        if self.budget is not None:
            raise CompiledPolicyNotAppliedError(
                f"{policy}: {self.budget.source} is {self.budget.value}, by which AOT's partitioner decides what is "
                f"saved, against the policy, in a graph that holds checkpointed regions. Set it to 1.0, or leave "
                f"fastac.enable out and call fastac.inform_partitioner(), with which attention counts as what it is."
            )

    def leave(self) -> None:
        """A region was traced: its nodes have their tags, which a partitioner may change later on."""
        for graph in self.graphs:
            self.saved.update(
                n.name for n in _attention(graph) if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
            )

    def complete(self) -> None:
        """Count what the backward may run, now that the graphs are there, and let go of them."""
        while self.graphs:
            for node in _attention(self.graphs.pop()):
                again = node.meta.get("recompute") in _RECOMPUTED or compiler_internals.is_of_backward(node)
                self.may_run += again and node.name not in self.saved


def _attention(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    for node in graph.nodes:
        resolved = classify(node.target) if node.op == "call_function" else None
        if resolved is not None and resolved.is_attention:
            yield node


_traced: dict[str, Traced] = {}  # by the id of the compilation; other threads add to it
_watched: weakref.WeakKeyDictionary[type, set[Policy]] = weakref.WeakKeyDictionary()  # graphs called inside regions
_resets = 0


def _complete() -> None:
    for traced in list(_traced.values()):
        traced.complete()


_compilations = compiler_internals.Compilations(_complete)

time = _compilations.look
"""A number that changes with every compilation: what a region calls may be other code since. 0 without dynamo."""


class _Backward(threading.local):
    """The backward of a graph that runs in this thread: what was run again in it so far."""

    node: object = None
    again: int = 0


_backward = _Backward()


def region(policy: Policy) -> Traced:
    """A region is about to be traced by AOT, in this thread."""
    traced = _of_this_compilation()
    graph = compiler_internals.graph_being_traced()
    if graph is not None and not any(graph is one for one in traced.graphs):
        traced.graphs.append(graph)
    traced.policies.add(policy)
    _look_at_backward()
    return traced


def _of_this_compilation() -> Traced:
    now = _forget_after_reset()
    name = compiler_internals.compile_id()
    return Traced() if name is None else _traced.setdefault(name, Traced(now))


def _forget_after_reset() -> int:
    """Forget graphs of before a reset of dynamo; returns the time."""
    global _resets
    now = time()
    if _resets != _compilations.resets:
        _resets = _compilations.resets
        _traced.clear()
    return now


def watch(nodes: Iterable[Any], policy: Policy) -> None:
    """See to it that compiled graphs among a region's autograd nodes do not run a saved attention again."""
    for function in _functions_of(nodes):
        _watched.setdefault(function, set()).add(policy)
        _look_at_backward()


def ids_among(nodes: Iterable[Any]) -> set[str]:
    """The ids that the graphs which some of these autograd nodes stand for were compiled under."""
    return {name for name in map(compiler_internals.compile_id_of, _functions_of(nodes)) if name is not None}


def _functions_of(nodes: Iterable[Any]) -> Iterator[type]:
    for node in nodes:
        function = torch_internals.function_of(node) if node.name() == torch_internals.COMPILED_NODE else None
        if function is not None:
            yield function


def _look_at_backward() -> None:
    if _ran_again not in interception.watchers:
        interception.watchers.append(_ran_again)


def _ran_again(resolved: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An attention kernel is about to run where no region is open."""
    if not torch_internals.in_backward() or not resolved.is_attention or torch_internals.has_stand_ins(args):
        return
    function = compiler_internals.compiled_function()
    if function is None or torch_internals.in_recompute():
        return
    policies, allowed = _told(function)
    keys = resolved.keys(args, kwargs)
    policy = next((policy for policy in policies if policy.saves(keys)), None)
    if policy is None:
        return
    node = (
        function,
        torch_internals.sequence_number(compiler_internals.running_node()),
        torch_internals.running_backward(),
    )
    if _backward.node != node:
        _backward.node, _backward.again = node, 0
    _backward.again += 1
    if _backward.again > allowed:
        budget = compiler_internals.memory_budget()
        now = f" It is {budget.value} now." if budget.value != 1 else ""
        raise PolicyNotAppliedError(
            f"{policy}: {resolved.name} over {keys} keys ran again in the backward of a graph that torch.compile made "
            f"(compilation {compiler_internals.compile_id_of(function)}): the compiler did not keep what the policy "
            f"saves. torch._functorch.config.activation_memory_budget below 1 does that.{now} So does a partitioner of "
            f"your own, or a graph from torch's cache that was made under either. Take it away, call "
            f"torch._dynamo.reset(), and train once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
        )


def _told(function: type) -> tuple[Iterable[Policy], int]:
    """The policies of the regions in or around a graph, and how many attention calls its backward may run."""
    watched = _watched.get(function)
    if watched is not None:
        return watched, 0
    _forget_after_reset()
    traced = _traced.get(compiler_internals.compile_id_of(function) or "")
    if traced is None:
        return (), 0
    traced.complete()
    return traced.policies, traced.may_run


def decided(
    blocks: Mapping[str, tuple[str, Policy | None, int]], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """For each block, by name, what was decided for its calls when it was traced last; nothing where it was not.

    blocks: class, policy, and since when what is known of the block otherwise; a trace before that does not count. A
    block's class, name and policy tell it from others: a graph knows no more of it, so that two models of one class are
    not told apart, but by ids, which compilations count.
    """
    _forget_after_reset()
    found: dict[str, list[Call]] = {}
    for traced in [traced for name, traced in _traced.copy().items() if ids is None or name in ids]:
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
    stack = compiler_internals.module_stack()
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
