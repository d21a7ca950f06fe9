"""What a policy says of a region in a trace: AOT's, or another, in which the region is marked and nothing else.

AOT lets nothing but dispatch modes into a region, so there torch's selective checkpointing asks the policy, and the
compiler builds the saving into the graph. In any other trace (`make_fx`) a recompute would be more of the same
operators, with random numbers of its own: the nodes get marks, which `fastac.graph.apply` reads. Whoever looks at a
traced region, these contexts or a partitioner, asks one class what the policy says (`Decisions`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.backends.plugins import prepare
from fastac.compile import graphs
from fastac.diagnosis.observer import Observer
from fastac.diagnosis.recognition import SoftmaxAttention, coarse_numbers, looks_like_attention_forward
from fastac.engine import releases, torch_private
from fastac.engine.blocks import block_of as block_of_function
from fastac.engine.blocks import describe
from fastac.engine.sparse import is_choice
from fastac.engine.tape import Replay, Tape, engine
from fastac.engine.torch_private import qualified_name
from fastac.errors import CompiledPolicyNotAppliedError
from fastac.policy import Policy
from fastac.registry import classify

logger = logging.getLogger("fastac")


class Decisions:
    """Looks at the operators of one region in their order. What cannot be saved is reported at the end."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._softmax_attention = SoftmaxAttention()
        self._small = 0
        self._written_out: list[int] = []  # numbers of keys
        self._coarse: list[int] = []
        self._unknown: list[torch_private.Op] = []
        self._exchanged: list[Any] = []  # what saved collectives return, before it is waited for

    def of(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> bool | None:
        """Whether the policy saves what an operator has returned; None for what it has nothing to say about.

        Raises UnsupportedBackendError for an attention kernel that does not train, FastacError for one that is to be
        saved and was given a tensor to write.
        """
        bound = classify(op)
        if bound is None:
            self._look_for_attention(op, args, outputs)
            return None
        if bound.is_attention:
            self._coarse.append(bound.coarse_keys(args, kwargs))
            bound.check_trains()
            saved = bool(self.policy.saves(bound.keys(args, kwargs)))
            if saved:
                bound.check_call(args, kwargs)
            return saved
        if bound.kind == "decomposition":
            self._small += self.policy.saves(_number(bound.keys(args, kwargs)))
            return None
        if bound.kind == "choice":
            return is_choice(args) and not self.policy.saves_nothing
        return self._of_collective(bound.kind, args, outputs)

    def _of_collective(self, kind: str, args: Sequence[Any], outputs: Any) -> bool | None:
        """A collective that is saved is saved with its wait: a graph may hold what is complete in other memory."""
        if not self.policy.saves_collectives:
            return None
        if kind == "exchange":
            self._exchanged += outputs if isinstance(outputs, (list, tuple)) else [outputs]
            return True
        return True if kind == "wait" and any(args[0] is one for one in self._exchanged) else None

    def _look_for_attention(self, op: Any, args: Sequence[Any], outputs: Any) -> None:
        if self.policy.saves_nothing or not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            return
        keys = self._softmax_attention.follow(op, args, outputs) if isinstance(op, torch._ops.OpOverload) else None
        if keys is not None and self.policy.saves(keys):
            self._written_out.append(keys)
        elif looks_like_attention_forward(qualified_name(op), args):
            self._unknown.append(op)

    def check(self, where: str = "") -> None:
        """Raise CompiledPolicyNotAppliedError when some of the operators so far cannot be saved. where: they are."""
        coarse = coarse_numbers(self._coarse)
        written_out = sum(keys not in coarse for keys in self._written_out)
        refuse_unsaved(self.policy, self._small + written_out, self._unknown, where)


def _number(keys: Any) -> int:
    return keys if isinstance(keys, int) else sys.maxsize  # a symbolic number counts as many


def refuse_unsaved(policy: Policy, small: int, unknown: Sequence[torch_private.Op], where: str = "") -> None:
    """Raise CompiledPolicyNotAppliedError for attention of a region in a graph that cannot be saved.

    small: how many calls ran as small ops. unknown: ops without a row.
    """
    if small:
        what = (
            f"{small} ran as small ops, with no output to save (a mask that requires grad, dropout, unequal head dims, "
            f"a query that is not 4-D, the math kernel forced, or attention written out)"
        )
    elif unknown:
        what = f"{qualified_name(unknown[0])} looks like an attention forward and has no row (fastac.register)"
    else:
        return
    raise CompiledPolicyNotAppliedError(
        f"{where}{': ' * bool(where)}{policy}: not every attention call of a checkpointed region in a graph can be "
        f"saved.\n{what}.\n"
        f'Mend the cause, or use policy="full" for this block.'
    )


def refuse_eager_only(policy: Policy, where: str = "this region") -> None:
    """Raise for a policy that goes by Linear modules, of which a trace knows none, or that offloads."""
    if policy.linear:
        raise CompiledPolicyNotAppliedError(
            f"{policy}: which Linear module a product belongs to is seen in eager mode alone, and {where} is in a "
            f'graph or compiled. Use a policy of attention there, as "long_attn_only".'
        )
    if policy.offload:
        raise CompiledPolicyNotAppliedError(
            f"{policy}: {where} is in a graph, which holds its tensors itself: offload needs an eager region. Use "
            f"fastac.compile(model, policy), which compiles each block inside its region, or a policy without offload."
        )


# Regions that AOT traces

IS_POSSIBLE = releases.has(releases.COMPILED_MODELS)
"""Before, the policy that AOT asks is not shown what an operator returns. A constant: dynamo reads it."""


def need_torch() -> Any:
    """Raise FastacError where this torch cannot trace a region: the context_fn of one that it is about to trace."""
    releases.need(releases.COMPILED_MODELS, 'Use fastac.compile(model), which compiles its blocks, or policy="full".')


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_RecordMode = type(create_selective_checkpoint_contexts([])[0])
"""The dispatch mode of torch's selective checkpointing. AOT takes nothing but dispatch modes."""


class _Checked(_RecordMode):  # type: ignore[misc, valid-type]
    """Calls its `leave` after an orderly exit. A mode becomes one of these by its `__class__`."""

    supports_higher_order_operators = True  # torch has rules for some of them by the exact type of its own mode
    leave: Callable[[], None]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self.leave()


def traced_contexts(policy: Policy) -> Contexts:
    """Contexts for a region that AOT traces. Leaving the forward raises CompiledPolicyNotAppliedError when need be.

    Not at the call itself: `sdpa_kernel(...)` inside the region is undone by the traced graph, which must get to that.
    """
    need_torch()
    refuse_eager_only(policy)
    traced = graphs.region(policy)
    decisions = Decisions(policy)

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = decisions.of(op, args, kwargs, context.op_output)
        bound = classify(op)
        if bound is not None and bound.is_attention:
            traced.add(policy, bound, bound.keys(args, kwargs), bool(saved), context.op_output)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def leave() -> None:
        decisions.check()
        traced.leave()

    forward, recompute = create_selective_checkpoint_contexts(decide)
    forward.__class__, forward.leave = _Checked, leave
    return forward, recompute


# Regions that torch's own checkpoint runs


def run_under_torch(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, options: Any
) -> Any:
    """Call torch's checkpoint: in a trace, or in its debug mode, which it refuses where a policy saves something."""
    is_plain = policy.saves_nothing and not policy.offload
    context_fn = noop_context_fn if is_plain else functools.partial(traced_contexts, policy)
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **options, **kwargs)


def run_in_dynamo(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, options: Any
) -> Any:
    """The same where dynamo traces the call. It puts the region into its graph."""
    if policy.saves_nothing and not policy.offload:
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    context_fn = need_torch
    if IS_POSSIBLE:
        _prepare_trace()
        context_fn = functools.partial(_contexts_in_graph, policy)
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **options, **kwargs)


@torch_private.constant_under_dynamo
def _prepare_trace() -> None:
    """Load plugins and make known kernels visible, which must not happen under AOT's modes."""
    prepare()
    graphs.note_region()


def _contexts_in_graph(policy: Policy) -> Contexts:
    """The contexts of a region that dynamo put into a graph; called by AOT, or at run time by a backend without AOT."""
    if torch_private.in_proxy_trace():
        return traced_contexts(policy)
    refuse_eager_only(policy)
    tape = Tape(policy, owners=[])
    return _InGraph(tape, Observer(None, (), tape)), _ReplayInGraph(tape)


class _InGraph:
    """The forward of a region whose function is not known, only a graph of it: watched and judged every time.

    AOT runs one, too, on tensors without data, before it traces.
    """

    def __init__(self, tape: Tape, observer: Observer) -> None:
        self.tape = tape
        self.observer = observer

    def __enter__(self) -> None:
        engine.in_graphs += 1
        self.tape.__enter__()
        self.observer.__enter__()

    def __exit__(self, *exception: Any) -> None:
        try:
            self.observer.__exit__(*exception)  # first: a scope that is open must not see what it does
        finally:
            self.tape.__exit__(*exception)
        if exception[0] is None:
            small = len(self.observer.small) + len(self.tape.decomposed)
            refuse_unsaved(self.tape.policy, small, self.observer.unknown)
            if self.tape.made:  # of a backend without AOT: the graph really runs
                for collector in engine.collectors:
                    collector.append(self.tape.result())


class _ReplayInGraph:
    """The context of a region's recomputes: each opens a `Replay` of its own, as two threads may recompute at once."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        Replay(self.tape).__enter__()

    def __exit__(self, *exception: object) -> None:
        assert engine.thread.scope is not None
        engine.thread.scope.__exit__(*exception)


# Regions in other traces

REGION = "fastac_region"
"""Key in a node's `meta["custom"]`: the number of its region, unique in the process and growing."""

# Texts and numbers: they can be stored.
_POLICY, _MIN_KV, _COLLECTIVES, _WHERE = "fastac_policy", "fastac_min_kv", "fastac_collectives", "fastac_block"

_numbers = itertools.count(1)
_expected: contextvars.ContextVar[bool] = contextvars.ContextVar("expected", default=False)
_blocks: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def run_annotated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> Any:
    """Call a function whose operators the trace is to know as one region; as it is where gradients are off."""
    releases.need_traces()
    refuse_eager_only(policy)
    if not _expected.get():
        _warn()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    number = next(_numbers)
    block = block_of_function(function)
    if block is not None:
        _blocks[number] = block
    marks = {
        REGION: number,
        _POLICY: policy.name,
        _MIN_KV: policy.min_kv,
        _COLLECTIVES: policy.collectives,
        _WHERE: describe(function),
    }
    with torch.fx.traceback.annotate(marks):
        return function(*args, **kwargs)


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """In which a trace is one that is meant for `fastac.graph.apply`, and needs no warning."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


@functools.cache
def _warn() -> None:
    logger.warning(
        "a trace that is neither dynamo nor AOT: checkpointed regions are marked in it, and nothing is recomputed "
        "until fastac.graph.apply is called on the graph"
    )


def policy_of(marks: Mapping[str, Any]) -> Policy:
    """The policy a region was checkpointed with, from the marks on one of its nodes."""
    return Policy(marks[_POLICY], marks[_MIN_KV], marks[_COLLECTIVES])


def where(marks: Mapping[str, Any]) -> str:
    """The region's block or function, for messages."""
    return str(marks[_WHERE])


def block_of(number: int) -> torch.nn.Module | None:
    """The block of a region, as long as it lives; None for a function."""
    return _blocks.get(number)
