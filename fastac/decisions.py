"""What a policy says of the operators of a traced region: saved, recomputed, or attention that can not be saved.

One class for every trace: AOT's, those of `fastac.graph`, and joint graphs that a partitioner is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastac.policy import Policy
from fastac.recognition import (
    Decomposed,
    SoftmaxAttention,
    UnknownOp,
    looks_like_attention_forward,
    without_coarse,
)
from fastac.registry import classify, qualified_name
from fastac.rows import CollectiveOp, DecompositionOp, SelectionOp


class Decisions:
    """Looks at the operators of one region in their order. What can not be saved is told at the end."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._softmax_attention = SoftmaxAttention()
        self._small: list[Decomposed] = []
        self._written_out: list[Decomposed] = []
        self._coarse: list[int] = []
        self._unknown: list[UnknownOp] = []
        self._exchanged: list[Any] = []  # what saved collectives return, before it is waited for

    def of(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> bool | None:
        """Whether the policy saves what an operator has returned; None for what it has nothing to say about.

        Raises UnsupportedBackendError for an attention kernel that does not train, FastacError for one that is to be
        saved and was given a tensor to write.
        """
        resolved = classify(op)
        if resolved is None:
            self._look_for_attention(op, args, outputs)
            return None
        if isinstance(resolved.row, DecompositionOp):
            found = Decomposed.from_call(resolved, args, kwargs)
            if self.policy.saves(found.keys):
                self._small.append(found)
            return None
        if isinstance(resolved.row, SelectionOp):
            return bool(args[0].is_floating_point()) and not self.policy.saves_nothing
        if isinstance(resolved.row, CollectiveOp):
            return self._of_collective(resolved.row.kind, args, outputs)
        self._coarse.append(resolved.coarse_keys(args, kwargs))
        resolved.check_trains()
        saved = bool(self.policy.saves(resolved.keys(args, kwargs)))
        if saved:
            resolved.check_writes(args, kwargs)
        return saved

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
        found = None
        if isinstance(op, torch._ops.OpOverload):
            found = self._softmax_attention.follow(op, args, outputs)
        if found is not None and self.policy.saves(found.keys):
            self._written_out.append(found)
        elif looks_like_attention_forward(name := qualified_name(op), args):
            self._unknown.append(UnknownOp(*name.split("::")))

    def failure(self) -> str | None:
        """The message for what can not be saved among the operators so far; None where all can."""
        missed = [found.attention for found in (*self._small, *without_coarse(self._written_out, self._coarse))]
        return traced_failure(self.policy, missed, self._unknown) if missed or self._unknown else None


def traced_failure(policy: Policy, small: Sequence[str], unknown: Sequence[UnknownOp]) -> str:
    """The message for a region in a graph: attention that ran as small ops, and ops without a row."""
    if small:
        what = (
            f"{small[0]} ran as small ops, which leave no attention output to save (a mask that requires grad, "
            f"dropout, unequal head dims, a query that is not 4-D, the math kernel forced, or attention written out)"
        )
    else:
        what = f"{'::'.join(unknown[0])} looks like an attention forward and has no row (fastac.register)"
    return (
        f"{policy}: not every attention call of a checkpointed region in a compiled graph can be saved. {what}. "
        f'Mend the cause, or use policy="full" for this block.'
    )
