"""The same policy as torch's selective checkpointing: for AOT's tracing, where only dispatch modes may enter a region.

Also what `engine="sac"` runs in eager mode. There torch's own limits hold and are refused where they would give wrong
gradients: a saved kernel that draws random numbers, and compiled code inside the region.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fastac import torch_internals
from fastac.census import Call, Census, Observer
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.policy import Policy
from fastac.recognition import SoftmaxAttention, looks_like_attention_forward
from fastac.registry import DecompositionOp, ResolvedOp, classify
from fastac.tape import Decomposed

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def traced_contexts(policy: Policy) -> Contexts:
    """Contexts for a region that AOT traces. Raises CompiledPolicyNotAppliedError at the first call it can not save."""
    softmax_attention = SoftmaxAttention()

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        resolved = classify(op)
        if resolved is None:
            found = None
            if isinstance(op, torch._ops.OpOverload):
                found = softmax_attention.follow(op, args, context.op_output)
            if found is not None and policy.saves(found.keys):
                raise _not_applied(policy, found.attention, "ran as small ops, which leave no attention output to save")
            if looks_like_attention_forward(op._schema.name if _is_op(op) else op.name(), args):
                raise _not_applied(policy, str(op), "looks like an attention forward and has no row (fastac.register)")
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(resolved.row, DecompositionOp):
            missed = Decomposed.from_call(resolved, args, kwargs)
            if policy.saves(missed.keys):
                raise _not_applied(
                    policy,
                    missed.attention,
                    "was decomposed into small ops: a mask that requires grad, dropout, unequal head dims, a query "
                    "that is not 4-D, or the math kernel forced",
                )
            return CheckpointPolicy.PREFER_RECOMPUTE
        return _verdict(resolved, policy, args, kwargs)

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-any-return]


def _is_op(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload)


def _verdict(resolved: ResolvedOp, policy: Policy, args: Any, kwargs: Any) -> CheckpointPolicy:
    if policy.saves(resolved.keys(args, kwargs)):
        resolved.check_writes(args, kwargs)
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _not_applied(policy: Policy, attention: str, reason: str) -> CompiledPolicyNotAppliedError:
    return CompiledPolicyNotAppliedError(
        f"{policy}: {attention}, in a checkpointed region that torch.compile is tracing, {reason}. "
        f'Mend the cause, or use policy="full" for this block.'
    )


class SelectiveRecord:
    """The forward of a region under torch's selective checkpointing, with what fastac must know about it."""

    def __init__(self, policy: Policy, observer: Observer | None) -> None:
        self.policy = policy
        self.observer = observer
        self.entered = False
        self.calls: list[ResolvedOp] = []
        self.missed: list[Decomposed] = []
        self._found: list[Call] = []
        self._mode, self.replay = create_selective_checkpoint_contexts(self._decide)

    def census(self) -> Census:
        """What the region did."""
        return Census(list(self.calls), tuple(self._found))

    def __enter__(self) -> SelectiveRecord:
        self.entered = True
        if self.observer is not None:
            self.observer.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._mode.__exit__(*exception)
        finally:
            if self.observer is not None:
                self.observer.__exit__(*exception)

    def _decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        resolved = classify(op)
        if resolved is None or torch_internals.has_stand_ins(args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(resolved.row, DecompositionOp):
            missed = Decomposed.from_call(resolved, args, kwargs)
            if self.policy.saves(missed.keys):
                self.missed.append(missed)
            return CheckpointPolicy.PREFER_RECOMPUTE
        verdict = _verdict(resolved, self.policy, args, kwargs)
        saved = verdict is CheckpointPolicy.MUST_SAVE
        if saved and resolved.draws(args, kwargs):
            raise FastacError(
                f'engine="sac": {resolved.name} draws random numbers here, and torch\'s selective checkpointing does '
                f"not restore the generator after a saved call: later dropout would differ in recompute. Use the "
                f"default engine, which does."
            )
        outputs = context.op_output if isinstance(context.op_output, (tuple, list)) else (context.op_output,)
        held = sum(t.untyped_storage().nbytes() for t in outputs if isinstance(t, torch.Tensor)) if saved else 0
        self.calls.append(resolved)
        self._found.append(Call(resolved.name, int(resolved.keys(args, kwargs)), saved, held))
        return verdict
