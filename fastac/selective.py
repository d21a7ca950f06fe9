"""The same policy as torch's selective checkpointing: for AOT's tracing, where only dispatch modes may enter a region.

Also what `engine="sac"` runs in eager mode. There torch's own limits hold and are refused where they would give wrong
gradients: a saved kernel that draws random numbers, and compiled code inside the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fastac import compiled_graphs, opaque, torch_internals
from fastac.census import Call, Census
from fastac.choices import Choices, Reader
from fastac.collectives import Communication
from fastac.decisions import Decisions
from fastac.entries import CountedOps
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.observation import Observer
from fastac.policy import Policy
from fastac.preservation import autocast_as_called, is_of_torch
from fastac.recognition import Decomposed
from fastac.registry import ResolvedOp, classify
from fastac.rows import CollectiveOp, DecompositionOp, SelectionOp
from fastac.selection import Selection

COMPILED_CODE = (
    'engine="sac": torch\'s selective checkpointing around compiled code may keep buffers that the code reuses, with '
    "wrong gradients. Use the default engine."
)

REPLAY_FAILURES = {
    "backward an extra time": (
        "this region was backpropagated already, and torch's selective checkpointing allows that once. Use the default "
        "engine, under which retain_graph=True works."
    ),
    "has been mutated": (
        "a saved output, of attention or a collective, was changed in place. Replace the in-place operation, or use "
        "the default engine, which keeps a copy where the change is legal."
    ),
    "not found in storage": (
        "recompute made a call that the forward did not: the checkpointed function took another path. Make it depend "
        "on its arguments alone."
    ),
}
"""Words of torch's error (2.13) -> what it means. An error with other words passes as it is."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_RecordMode, _ReplayMode = map(type, create_selective_checkpoint_contexts([]))
"""The dispatch modes of torch's selective checkpointing. A mode becomes one of ours by its `__class__`."""


class _Checked(_RecordMode):  # type: ignore[misc, valid-type]
    """Calls its `leave` after an orderly exit. AOT takes nothing but dispatch modes."""

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
    if policy.linear:
        raise CompiledPolicyNotAppliedError(
            f"{policy}: which Linear module a product belongs to is seen in eager mode "
            f"alone, and this region is in a graph that is compiled. Use a policy of attention there, as "
            f'"long_attn_only"; `fastac plan` says what it holds.'
        )
    traced = compiled_graphs.region(policy)
    decisions = Decisions(policy)

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = decisions.of(op, args, kwargs, context.op_output)
        resolved = classify(op)
        if resolved is not None and resolved.is_attention:
            traced.add(policy, resolved, resolved.keys(args, kwargs), bool(saved), context.op_output)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def leave() -> None:
        failure = decisions.failure()
        if failure is not None:
            raise CompiledPolicyNotAppliedError(failure)
        traced.refuse_budget(policy)
        traced.leave()

    forward, recompute = create_selective_checkpoint_contexts(decide)
    forward.__class__, forward.leave = _Checked, leave
    return forward, recompute


def _verdict(resolved: ResolvedOp, policy: Policy, args: Any, kwargs: Any) -> CheckpointPolicy:
    resolved.check_trains()
    if policy.saves(resolved.keys(args, kwargs)):
        resolved.check_writes(args, kwargs)
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Recording(_RecordMode):  # type: ignore[misc, valid-type]
    """Runs kernels under the autocast state they were called under."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_torch(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with autocast_as_called(func):
            return super().__torch_dispatch__(func, types, args, kwargs)


class _Replaying(_ReplayMode):  # type: ignore[misc, valid-type]
    """Chooses again what the forward chose, and runs what the forward did not know."""

    supports_higher_order_operators = True

    def extend(self, record: SelectiveRecord, choices: Choices, selections: Sequence[Selection | None]) -> None:
        """Give it what the forward knew."""
        self.reader, self.remaining, self.ops = Reader(choices), iter(selections), record.ops
        self.communicated = record.communicated
        self.repeated = ("gather",) if record.policy.saves_collectives else ("gather", "exchange")

    def __enter__(self) -> Any:
        self.reader.used.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        resolved = classify(func)
        # What has no row was decided to be recomputed. torch would look it up in what the forward stored, and miss what
        # the forward did not call: the cast of a weight that autocast had in its cache.
        kwargs = kwargs or {}
        if resolved is None and is_of_torch(func):  # by far the most
            return func(*args, **kwargs)
        with autocast_as_called(func):
            if resolved is None or resolved not in self.ops:
                return func(*args, **kwargs)
            if isinstance(resolved.row, SelectionOp):
                return self.reader.choose(resolved, args, kwargs, lambda: func(*args, **kwargs))
            if resolved.has_selection and (selection := next(self.remaining, None)) is not None:
                selection.put_into(resolved, resolved.selection(args, kwargs))
            outputs = self._replayed(func, types, args, kwargs)
            if isinstance(resolved.row, CollectiveOp) and resolved.row.kind in self.repeated:
                self.communicated.repeat(outputs)
            return outputs

    def _replayed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            told = next((told for words, told in REPLAY_FAILURES.items() if words in str(error)), None)
            if told is None or isinstance(error, FastacError):
                raise
            raise FastacError(f'engine="sac": {told} (at {func})') from error


class SelectiveRecord:
    """The forward of a region under torch's selective checkpointing, with what fastac must know about it."""

    def __init__(self, policy: Policy, observer: Observer | None) -> None:
        self.policy = policy
        self.observer = observer
        self.entered = False
        self.calls: list[ResolvedOp] = []
        self.missed: list[Decomposed] = []
        self._found: list[Call] = []
        self.owners: list[int] = []
        self.products: list[str] = []  # outputs of Linear modules are saved on the tape alone
        self._choices = Choices()
        self.communicated = Communication()
        self._selections: list[Selection | None] = []  # of every sparse call, None for one that is recomputed
        self.late: list[str] = []  # ops that were intercepted too late to be saved here
        self.ops = CountedOps()
        self._without_row: set[Any] = set()
        self._mode, self.replay = create_selective_checkpoint_contexts(self._decide)
        self._mode.__class__, self.replay.__class__ = _Recording, _Replaying
        self.replay.extend(self, self._choices, self._selections)

    @property
    def keys(self) -> list[int]:
        """Over how many keys each call attends."""
        return [call.keys for call in self._found]

    @property
    def communication(self) -> Communication | None:
        """What the collectives of the region did; None where it has none."""
        return self.communicated if self.communicated.issued else None

    def census(self) -> Census:
        """What the region did."""
        return Census(list(self.calls), tuple(self._found), self._choices.held_bytes)

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
        if resolved is None:
            self._without_row.add(op)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if torch_internals.has_stand_ins(args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op not in self._without_row and not opaque.is_opaque(resolved):
            self.ops.let_in(resolved)
        if resolved not in self.ops:
            self.late.append(resolved.name)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(resolved.row, DecompositionOp):
            missed = Decomposed.from_call(resolved, args, kwargs)
            if self.policy.saves(missed.keys):
                self.missed.append(missed)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(resolved.row, SelectionOp):
            self._choices.keep(resolved, args, kwargs, context.op_output)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(resolved.row, CollectiveOp):
            return self._decide_collective(resolved.row.kind, context.op_output)
        verdict = _verdict(resolved, self.policy, args, kwargs)
        saved = verdict is CheckpointPolicy.MUST_SAVE
        if saved and not torch.is_grad_enabled() and torch_internals.in_compiled_code():
            raise FastacError(COMPILED_CODE)
        if saved and resolved.draws(args, kwargs):
            raise FastacError(
                f'engine="sac": {resolved.name} draws random numbers here, and torch\'s selective checkpointing does '
                f"not restore the generator after a saved call: later dropout would differ in recompute. Use the "
                f"default engine, which does."
            )
        outputs = context.op_output if isinstance(context.op_output, (tuple, list)) else (context.op_output,)
        held = sum(t.untyped_storage().nbytes() for t in outputs if isinstance(t, torch.Tensor)) if saved else 0
        if resolved.has_selection:
            self._selections.append(Selection(resolved.selection(args, kwargs)) if saved else None)
        self.calls.append(resolved)
        self.owners.append(torch_internals.newest_node())
        extra = opaque.extra_bytes(resolved, outputs) if saved else 0
        self._found.append(Call(resolved.name, int(resolved.keys(args, kwargs)), saved, held, extra))
        return verdict

    def _decide_collective(self, kind: str, outputs: Any) -> CheckpointPolicy:
        if kind == "wait":
            return CheckpointPolicy.PREFER_RECOMPUTE  # it returns the memory that it was given
        self.communicated.forward(outputs)
        if kind == "gather" or not self.policy.saves_collectives:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.communicated.save(outputs)
        return CheckpointPolicy.MUST_SAVE
