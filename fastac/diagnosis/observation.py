"""Observes one region: the first of a kind, or one after a region that made fewer attention calls than the first."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from fastac.diagnosis import not_applied, ran_again, small_ops, warn_of_fewer
from fastac.diagnosis.autograd_graph import (
    GENERATED,
    hidden_functions,
    nodes_between,
    parameters_cut_off,
    place_of,
    recorded_nodes,
)
from fastac.diagnosis.eager_look import look
from fastac.diagnosis.observer import Observer
from fastac.diagnosis.recognition import no_attention, suggested_visible
from fastac.diagnosis.unknown import check_rows, unknown_calls
from fastac.engine import kinds, opaque, releases, torch_private
from fastac.engine.blocks import block_of, describe, is_compiled, module_of
from fastac.engine.process import process
from fastac.engine.results import RegionResult
from fastac.engine.tape import Tape
from fastac.engine.torch_private import CompiledCalls
from fastac.registry import AttentionOp
from fastac.registry.torch_private import name_of, qualified_name

logger = logging.getLogger("fastac")


class _Run(NamedTuple):
    """A run of the region's function: the forward, or one more, eagerly."""

    nodes: Sequence[Any]  # of its autograd graph
    observer: Observer | None  # None if nobody could watch it
    tape: Tape


class Observation:
    """Watches the forward of one region, and gives its result, or the error for attention that was not saved.

    Args:
        function: what the region runs, with args and kwargs.
        tape: of the region.
        earlier: result of compiled code of this block class and policy with other inputs, which was run again eagerly
            then. It is not run again now.
    """

    def __init__(self, function: Any, args: Any, kwargs: Any, tape: Tape, earlier: RegionResult | None) -> None:
        self.function, self.args, self.kwargs, self.tape, self.earlier = function, args, kwargs, tape, earlier
        self.nodes: Sequence[Any] = ()
        self.compiled_calls = CompiledCalls()
        # No mode can watch a compiled function: it would run eagerly.
        is_visible = not is_compiled(function)
        self.observer = Observer(module_of(function), (args, kwargs), tape) if is_visible else None

    def __enter__(self) -> Observation:
        if self.observer is not None:
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(self.compiled_calls)
            self._stack.enter_context(self.observer)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.observer is not None:
            self._stack.__exit__(*exception)

    @property
    def late(self) -> list[str]:
        """Ops with a row whose library was loaded during the forward, which could not save their outputs."""
        return [] if self.observer is None else self.observer.late

    def result(self, outputs: Any) -> RegionResult:
        """The result of the region, whose forward has ended.

        Raises PolicyNotAppliedError if an attention that the policy saves was not saved. It names module, op and cause.
        """
        tape, where = self.tape, describe(self.function)
        if ran_again not in process.listeners:
            process.listeners.append(ran_again)
        self.nodes = nodes_between(outputs, (self.args, self.kwargs))
        forward = _Run(self.nodes, self.observer, tape)
        is_compiled = self._ran_compiled()
        eager = self._run_eagerly() if is_compiled else None
        problems = [] if self.observer is None else _problems_seen(self.observer, where)
        if eager is not None and eager.observer is not None:
            problems += _problems_seen(eager.observer, where) + _missing(eager.tape, tape, where)
        unknown: dict[str, None] = {}
        # dynamo traces into an autograd.Function, so that no node of compiled code shows it. The eager run does.
        for run in [forward] if eager is None else [forward, eager]:
            recorded = recorded_nodes(run.nodes, run.tape.callers or ())
            ops = () if run.observer is None else run.observer.ops
            problems += starmap(_hidden, hidden_functions(run.nodes, recorded, tape.policy, ops).items())
            unknown |= dict.fromkeys(unknown_calls(where, run.nodes, recorded, run.observer))
            check_rows(run.nodes, recorded, run.tape)
        problems += _drew(tape)
        if problems:
            raise not_applied(self.function, tape.policy, problems, len(tape.attention_calls))
        self._warn_of_cut_off(where)
        # Of compiled code the observer sees a part: only an eager run shows all of its FLOPs.
        whole = eager.observer if eager is not None else None if is_compiled else self.observer
        writing = sum(seen.writing for seen in (self.observer if whole is None else whole,) if seen is not None)
        result = tape.result(is_compiled, writing, tuple(unknown))
        if whole is None:
            return result
        return dataclasses.replace(result, flops=whole.flops, saved_flops=whole.saved_flops)

    def _ran_compiled(self) -> bool:
        """Whether code that torch.compile made ran in the region."""
        if self.observer is None or any(node.name() == torch_private.COMPILED_NODE for node in self.nodes):
            return True
        # Eager flex_attention compiles itself.
        return self.compiled_calls.count > sum(op.is_higher_order for op, _ in self.tape.attention_calls)

    def _run_eagerly(self) -> _Run | None:
        """Run compiled code once more, eagerly, to see its attention. None if it was run before, or must not run."""
        # Once per block class is enough: a run takes time, and what Python code in the block counts is counted twice.
        if self.earlier is not None:
            if len(self.tape.attention_calls) < len(self.earlier.attention_calls):
                warn_of_fewer(self.function)
            return None
        seen = look(self.function, self.args, self.kwargs, self.tape)
        if seen is None:
            _say_unseen(self.function, self.tape)
            return None
        observer, nodes = seen
        return _Run(nodes, observer, observer.tape)

    def _warn_of_cut_off(self, where: str) -> None:
        """Warn of attention parameters that get no gradient."""
        # This is not an error, because a user may mean it.
        if cut_off := parameters_cut_off(block_of(self.function), self.nodes):
            logger.warning(
                "%s: %d attention parameters require grad and get no gradient, such as %s: its output does not depend "
                "on them. A kernel without a backward does that (SageAttention). If it is intended: "
                "requires_grad_(False).",
                where,
                len(cut_off),
                cut_off[0],
            )


def _drew(tape: Tape) -> list[str]:
    """Sentences on ops that drew random numbers against their row."""
    return [
        f"{op.name} drew random numbers in a call in which, by its row (dropout={op.row.dropout!r}), it draws none: "
        f'random numbers after it would be wrong. Name the argument that decides in the row, or dropout="always"'
        for op in tape.denied
        if isinstance(op.row, AttentionOp)
    ]


def _say_unseen(function: Any, tape: Tape) -> None:
    """Say that compiled code is not run again: a warning if no attention was seen in it."""
    said = (
        f"{describe(function)}: compiled, with {len(tape.attention_calls)} attention calls. As ranks may communicate "
        f"in it, it is not run again eagerly: attention that compiled code hides is not found (fastac.verify in one "
        f"process tells)"
    )
    if tape.attention_calls:
        logger.info("%s", said)
    else:
        kinds.warn_once(function, "unseen", said)


def _problems_seen(observer: Observer, where: str) -> list[str]:
    """Sentences on attention that an observer saw and no tape could record."""
    problems = [small_ops(f"{where}.{call.module}".rstrip("."), call.keys, call.cause) for call in observer.small]
    problems += [
        f"{qualified_name(op)} looks like an attention forward and has no row. If it is one: {row}. "
        f"If not: {no_attention(*name_of(op).split('::'))}"
        for op, row in observer.unknown.items()
    ]
    problems += observer.elsewhere
    problems += [
        f"{name} was called, and fastac did not get the call: another package took its BackendSelect key since"
        for name in observer.passed_by()
    ]
    # A silent module may be one whose attention was named above, so it is named only if nothing else was found.
    return problems or [
        f"{where}.{name}: ran, and no attention call was seen: its kernel is called past the dispatcher. If it is an "
        f"autograd.Function: fastac.make_visible(TheFunction, layout=...). Else: docs/adding_a_backend.md"
        for name in observer.silent
    ]


def _missing(eager: Tape, tape: Tape, where: str) -> list[str]:
    """Sentences on calls that the eager run made and the compiled one did not."""
    # By backend: compiled flex_attention is an op of its own.
    made = collections.Counter(op.backend for op, _ in tape.attention_calls)
    problems = []
    for op, _ in eager.attention_calls:
        made[op.backend] -= 1
        if made[op.backend] >= 0:
            continue
        # Only this kernel runs again, and gradients are exact: no error.
        if op.is_opaque:
            logger.warning("%s: %s is made visible in eager code only: compiled, it is recomputed", where, op.name)
        elif op.is_higher_order:
            problems.append(
                f"{op.name} is compiled into code of its own, which calls no op that can be saved: use "
                f"fastac.compile_attention in the place of torch.compile, or fastac.compile(model); before torch "
                f"{releases.FIRST_TORCH[releases.FLEX]} leave it uncompiled"
            )
        else:
            problems.append(
                f"{op.name} is called in eager mode and not by the compiled code: either it calls the kernel past the "
                f"dispatcher (inductor's cpp_wrapper does), or the block takes another path from call to call"
            )
    return problems


def _hidden(function: type, shapes: Sequence[torch.Size | None]) -> str:
    """A sentence on an autograd.Function that hides an attention. shapes: of its inputs."""
    name = f"{function.__module__}.{function.__qualname__}"
    if opaque.is_visible(function):
        return f"{name}, made visible, was called with a tensor subclass (such as DTensor) or in another thread"
    if function.__name__.startswith(GENERATED):
        namespace, own = place_of(function)
        return (
            f"the op {namespace}::{own} looks like an attention, and was called in another thread: call it in the "
            f"block's own. If it is none: {no_attention(namespace, own)}"
        )
    return (
        f"{name}, an autograd.Function, looks like an attention, and no op shows its kernel. Once, before training: "
        f"{suggested_visible(function, shapes)}. If it is none: {no_attention(function.__module__, function.__name__)}"
    )
