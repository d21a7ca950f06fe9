"""Observes one region: the first of a kind, or one after a region that made fewer attention calls than the first."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from fastac.diagnosis.autograd_graph import (
    foreign_functions,
    functions_without_calls,
    hidden_attention,
    nodes_between,
    parameters_cut_off,
)
from fastac.diagnosis.eager_look import look
from fastac.diagnosis.every_step import not_applied, ran_again, warn_of_fewer
from fastac.diagnosis.observer import Observer
from fastac.diagnosis.unknown import check_rows, unknown_calls
from fastac.engine import kinds, releases, torch_private
from fastac.engine.blocks import block_of, describe, is_compiled, module_of
from fastac.engine.process import process
from fastac.engine.results import RegionResult
from fastac.engine.tape import Tape
from fastac.engine.torch_private import CompiledCalls

logger = logging.getLogger("fastac")


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
        self.where = describe(function)
        self.nodes: Sequence[Any] = ()
        self.compiled_calls = CompiledCalls()
        self.observer = Observer(module_of(function), (args, kwargs), tape)
        # No mode can watch a compiled function: it would run eagerly. The observer of one sees nothing.
        self.is_watched = not is_compiled(function)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Observation:
        if self.is_watched:
            self._stack.enter_context(self.compiled_calls)
            self._stack.enter_context(self.observer)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def result(self, outputs: Any) -> RegionResult:
        """The result of the region, whose forward has ended.

        Raises PolicyNotAppliedError if an attention that the policy saves was not saved. It names module, op and cause.
        """
        if ran_again not in process.listeners:
            process.listeners.append(ran_again)
        self.nodes = nodes_between(outputs, (self.args, self.kwargs))
        runs: list[tuple[Observer, Sequence[Any]]] = [(self.observer, self.nodes)]
        is_compiled = self._ran_compiled()
        if is_compiled and (eager := self._run_eagerly()) is not None:
            runs.append(eager)
        last, _ = runs[-1]
        problems = [] if last is self.observer else self._missing(last.tape)
        unknown: dict[str, None] = {}
        # dynamo traces into an autograd.Function, so that no node of compiled code shows it. The eager run does.
        for observer, nodes in runs:
            functions = functions_without_calls(nodes, observer.tape.callers or (), observer.ops)
            foreign = foreign_functions(functions)
            problems += observer.problems(self.where) + hidden_attention(functions, self.tape.policy)
            unknown |= dict.fromkeys(unknown_calls(self.where, foreign, observer.foreign))
            check_rows(foreign, observer.tape)
        if problems:
            raise not_applied(self.function, self.tape.policy, problems, len(self.tape.attention_calls))
        self._warn_of_cut_off()
        result = self.tape.result(is_compiled, last.writing, tuple(unknown))
        if is_compiled and last is self.observer:
            return result  # the observer saw a part of the FLOPs
        return dataclasses.replace(result, flops=last.flops, saved_flops=last.saved_flops)

    def _ran_compiled(self) -> bool:
        """Whether code that torch.compile made ran in the region."""
        if not self.is_watched or any(node.name() == torch_private.COMPILED_NODE for node in self.nodes):
            return True
        # Eager flex_attention compiles itself.
        return self.compiled_calls.count > sum(op.is_higher_order for op, _ in self.tape.attention_calls)

    def _run_eagerly(self) -> tuple[Observer, Sequence[Any]] | None:
        """Run compiled code once more, eagerly, to see its attention: `look`. None if it was run before."""
        made = len(self.tape.attention_calls)
        # Once per block class is enough: a run takes time, and what Python code in the block counts is counted twice.
        if self.earlier is not None:
            if made < len(self.earlier.attention_calls):
                warn_of_fewer(self.function)
            return None
        seen = look(self.function, self.args, self.kwargs, self.tape)
        if seen is None:
            said = (
                f"{self.where}: compiled, with {made} attention calls. As ranks may communicate in it, it is not run "
                f"again eagerly: attention that compiled code hides is not found (fastac.verify in one process tells)"
            )
            if made:
                logger.info("%s", said)
            else:
                kinds.warn_once(self.function, "unseen", said)
        return seen

    def _missing(self, eager: Tape) -> list[str]:
        """Sentences on calls that the eager run made and the compiled one did not."""
        # By backend: compiled flex_attention is an op of its own.
        made = collections.Counter(op.backend for op, _ in self.tape.attention_calls)
        problems = []
        for op, _ in eager.attention_calls:
            made[op.backend] -= 1
            if made[op.backend] >= 0:
                continue
            # Only this kernel runs again, and gradients are exact: no error.
            if op.is_opaque:
                said = "is made visible in eager code only: compiled, it is recomputed"
                logger.warning("%s: %s %s", self.where, op.name, said)
            elif op.is_higher_order:
                problems.append(
                    f"{op.name} is compiled into code of its own, which calls no op that can be saved: use "
                    f"fastac.compile_attention in the place of torch.compile, or fastac.compile(model); before torch "
                    f"{releases.FIRST_TORCH[releases.FLEX]} leave it uncompiled"
                )
            else:
                problems.append(
                    f"{op.name} is called in eager mode and not by the compiled code: either it calls the kernel past "
                    f"the dispatcher (inductor's cpp_wrapper does), or the block takes another path from call to call"
                )
        return problems

    def _warn_of_cut_off(self) -> None:
        """Warn of attention parameters that get no gradient."""
        # This is not an error, because a user may mean it.
        if cut_off := parameters_cut_off(block_of(self.function), self.nodes):
            logger.warning(
                "%s: %d attention parameters require grad and get no gradient, such as %s: its output does not depend "
                "on them. A kernel without a backward does that (SageAttention). If it is intended: "
                "requires_grad_(False).",
                self.where,
                len(cut_off),
                cut_off[0],
            )
