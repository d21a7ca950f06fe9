"""Applies a policy to a region that is traced: by AOT, which builds the saving into its graph, or by another tracer.

AOT accepts only dispatch modes in a region, so torch's selective checkpointing asks the policy there. In any other
trace (`make_fx`) a recompute would repeat the operators of the region, and draw other random numbers. So the region's
nodes are marked, and `fastac.graph.apply` reads the marks. These contexts and the partitioners of `fastac.graph` ask
the same class for the decision about an operator (`Decisions`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.backends.plugins import prepare
from fastac.compiled import graphs
from fastac.compiled.torch_private import NESTED_REGION
from fastac.diagnosis.recognition import SoftmaxAttention, coarse_numbers, looks_like_attention_forward, no_attention
from fastac.engine import kinds, releases, torch_private
from fastac.engine.blocks import block_of, describe
from fastac.engine.sparse import is_choice
from fastac.errors import CompiledPolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import classify
from fastac.registry.torch_private import Op, name_of

logger = logging.getLogger("fastac")


class Decisions:
    """Decides about the operators of one region, in their order. `check` reports attention that cannot be saved."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._softmax_attention = SoftmaxAttention()
        # Number of attention calls that the policy saves, but that ran as small ops.
        self._small = 0
        # Attention that is written out: the number of keys of each call.
        self._written_out: list[int] = []
        # Sparse attention: the number of blocks of each call.
        self._coarse: list[int] = []
        self._unknown: list[Op] = []
        # A nested region may hold attention, which is not shown.
        self._has_nested = False
        # The smallest memory budget that calls to be saved were traced under.
        self.budget = 1.0
        # Outputs of saved collectives, before the wait.
        self._exchanged: list[Any] = []

    def of(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> bool | None:
        """Whether the policy saves the outputs of an operator; None for an operator that it does not decide about.

        Raises UnsupportedBackendError for an attention kernel that does not train, and FastacError for a kernel that
        should be saved and was given a tensor to write.
        """
        bound = classify(op)
        if bound is None:
            self._look_for_attention(op, args, kwargs, outputs)
            return None
        if bound.is_attention:
            # Sparse attention chooses its blocks by a coarse attention, which is written out and need not be saved.
            self._coarse.append(bound.coarse_keys(args, kwargs))
            bound.check_trains()
            saved = bool(self.policy.saves(bound.keys(args, kwargs)))
            if saved:
                bound.check_call(args, kwargs)
            return saved
        if bound.kind == "decomposition":
            self._small += bool(self.policy.saves(bound.keys(args, kwargs)))
            return None
        if bound.kind == "choice":
            return is_choice(args) and self.policy.is_selective
        return self._of_collective(bound.kind, args, outputs)

    def _of_collective(self, kind: str, args: Sequence[Any], outputs: Any) -> bool | None:
        """A collective is saved together with its wait: a graph may hold the complete output in other memory."""
        if not self.policy.saves_collectives:
            return None
        if kind == "exchange":
            self._exchanged += outputs if isinstance(outputs, (list, tuple)) else [outputs]
            return True
        return True if kind == "wait" and any(args[0] is output for output in self._exchanged) else None

    def _look_for_attention(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        if not self.policy.is_selective or not isinstance(op, Op):
            return
        self._has_nested |= op is NESTED_REGION
        keys = self._softmax_attention.follow(op, args, outputs) if isinstance(op, torch._ops.OpOverload) else None
        if keys is not None and self.policy.saves(keys):
            self._written_out.append(keys)
        elif looks_like_attention_forward(op, args, kwargs):
            self._unknown.append(op)

    def check(self, where: str = "") -> None:
        """Raise CompiledPolicyNotAppliedError if some attention so far cannot be saved. where: the region's block."""
        coarse = coarse_numbers(self._coarse)
        small = self._small + sum(keys not in coarse for keys in self._written_out)
        if small:
            problem = (
                f"{small} ran as small ops, with no output to save (a mask that requires grad, dropout, unequal head "
                f"dims, a query that is not 4-D, the math kernel forced, or attention written out)"
            )
        elif self._unknown:
            namespace, _, name = name_of(self._unknown[0]).partition("::")
            problem = (
                f"{namespace}::{name} looks like an attention forward and has no row (fastac.register). "
                f"If it is not attention: {no_attention(namespace, name)}"
            )
        elif self._has_nested:
            problem = (
                "It has a torch.compiler.nested_compile_region, in which the compiler saves what it likes. Compile by "
                "fastac.compile(model) instead, or leave the nested region out"
            )
        elif self.budget < 1:
            problem = (
                f"The compiler runs what is saved again: activation_memory_budget is {self.budget:g} "
                f"(torch._functorch.config, or torch.autograd.graph.region_activation_memory_budget). Set it to 1"
            )
        else:
            return
        raise CompiledPolicyNotAppliedError(
            f"{where}{': ' * bool(where)}{self.policy}: not every attention call of a checkpointed region in a graph "
            f'can be saved.\n{problem}.\nFix the cause, or use policy="full" for this block.'
        )


def refuse_eager_only(policy: Policy, where: str = "this region") -> None:
    """Raise for a policy that saves outputs of Linear modules, or that offloads: a trace can do neither."""
    if policy.linear:
        raise CompiledPolicyNotAppliedError(
            f"{policy}: only eager mode shows which Linear module a product belongs to, and {where} is in a graph or "
            f'compiled. Use a policy that saves only attention there, such as "long_attn_only".'
        )
    if policy.offload:
        raise CompiledPolicyNotAppliedError(
            f"{policy}: {where} is in a graph, which holds its tensors itself: offload needs an eager region. Use "
            f"fastac.compile(model, policy), which compiles each block inside its region, or a policy without offload."
        )


# Regions that AOT traces

IS_POSSIBLE = releases.has(releases.COMPILED_MODELS)
"""Older releases do not show the outputs of an operator to the policy that AOT asks. A constant: dynamo reads it."""


def need_torch() -> Any:
    """Raise FastacError if this torch cannot trace a region. Used as the region's context_fn."""
    releases.need(releases.COMPILED_MODELS, 'Use fastac.compile(model), which compiles its blocks, or policy="full".')


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_RecordMode = type(create_selective_checkpoint_contexts([])[0])
"""The dispatch mode of torch's selective checkpointing. AOT accepts only dispatch modes."""


class _Checked(_RecordMode):  # type: ignore[misc, valid-type]
    """torch's own mode with a callback, `leave`, on exit without an exception.

    We assign `mode.__class__ = _Checked`: torch makes the mode, and AOT accepts only a dispatch mode.
    """

    # torch registers its mode with flex_attention (pytorch#150080) and other higher-order operators by its exact type,
    # which ours does not have. With this flag (pytorch#158077) they come to our mode like any other operator.
    supports_higher_order_operators = True
    leave: Callable[[], None]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self.leave()


def traced_contexts(policy: Policy) -> Contexts:
    """Contexts for a region that AOT traces.

    The context of the forward raises CompiledPolicyNotAppliedError on exit, not at the call: if the region has a
    `sdpa_kernel(...)`, the trace must get to its end, which resets the kernels.
    """
    need_torch()
    refuse_eager_only(policy)
    traced = graphs.note_region()
    decisions = Decisions(policy)

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = decisions.of(op, args, kwargs, context.op_output)
        bound = classify(op)
        if bound is not None and bound.is_attention:
            traced.append(graphs.traced_call(policy, bound, bound.keys(args, kwargs), bool(saved), context.op_output))
        if saved and torch_private.in_proxy_trace():  # without a trace the policy is asked for a plan
            decisions.budget = min(decisions.budget, torch_private.memory_budget())
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(decide)
    forward.__class__, forward.leave = _Checked, decisions.check
    return forward, recompute


# Regions that torch's own checkpoint runs


def run_under_torch(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, options: Any
) -> Any:
    """Call torch's checkpoint: in a trace, in which dynamo puts the region into its graph, or in torch's debug mode."""
    if torch.compiler.is_dynamo_compiling():
        _prepare_trace()
    # Without context_fn dynamo takes the region for plain checkpointing, which is what "full" asks for.
    if policy.is_selective or policy.offload:
        options = {**options, "context_fn": _context_fn(policy)}
    return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)


def _context_fn(policy: Policy) -> Callable[[], Contexts]:
    if not torch.compiler.is_dynamo_compiling():
        return functools.partial(traced_contexts, policy)
    if not IS_POSSIBLE:
        return need_torch
    # dynamo traces this function. It puts the partial into its graph, and AOT calls it when it traces that graph.
    return functools.partial(_contexts_in_graph, policy)


@torch_private.constant_under_dynamo
def _prepare_trace() -> None:
    """Load plugins and make known kernels visible. Under AOT's modes, later on, this would be traced."""
    prepare()
    graphs.note_region()


def _contexts_in_graph(policy: Policy) -> Contexts:
    """Contexts for a region that dynamo put into a graph. AOT asks for them; no other backend can have them."""
    # Not torch.compiler.is_compiling(): it is true in all threads while one of them compiles.
    if torch_private.in_proxy_trace():
        return traced_contexts(policy)
    if torch_private.is_abstract(()):  # AOT runs the graph on tensors without data, before it traces
        return contextlib.nullcontext(), contextlib.nullcontext()
    # backend="eager" ignored checkpoints in its graphs, without a warning (pytorch#160773).
    raise CompiledPolicyNotAppliedError(
        f"{policy}: a backend without AOT runs a graph that torch.compile made with this region. No attention can be "
        f'saved there. Use inductor or "aot_eager", or fastac.compile(model), which compiles blocks.'
    )


# Regions in other traces

REGION = "fastac_region"
"""Key in a node's `meta["custom"]` for the number of its region, unique in the process and growing."""

POLICY, WHERE = "fastac_policy", "fastac_block"
"""Keys for the policy that the region was checkpointed with, and for its block or function: class and name."""

_numbers = itertools.count(1)
_names: contextvars.ContextVar[Mapping[Any, str] | None] = contextvars.ContextVar("names", default=None)


def run_annotated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> Any:
    """Call a function, and mark its operators in the trace as a region. Without gradients they are not marked."""
    releases.need_traces()
    refuse_eager_only(policy)
    names = _names.get()
    if names is None and kinds.is_first("trace"):  # somebody else's trace
        logger.warning(
            "a trace that is neither dynamo nor AOT: fastac marks checkpointed regions in it, and nothing is "
            "recomputed until fastac.graph.apply is called on the graph"
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    where = (names or {}).get(block_of(function)) or describe(function)
    with torch.fx.traceback.annotate({REGION: next(_numbers), POLICY: policy, WHERE: where}):
        return function(*args, **kwargs)


@contextlib.contextmanager
def expected(model: torch.nn.Module) -> Iterator[None]:
    """In this context a trace is meant for `fastac.graph.apply`: no warning, and blocks are named as in the model."""
    token = _names.set({block: f"{class_name(model)}.{name}" for name, block in model.named_modules() if name})
    try:
        yield
    finally:
        _names.reset(token)
