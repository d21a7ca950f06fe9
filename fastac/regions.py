"""One call of a block under checkpointing: what its forward records, and whether that is all of its attention."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from fastac import (
    autograd_graph,
    census,
    compiled_graphs,
    diagnosis,
    explanation,
    interception,
    linear,
    opaque,
    partitioner,
    ranks,
    torch_internals,
)
from fastac.census import Census
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.observation import Observer
from fastac.policy import Policy
from fastac.preflight import is_compiled, refuse_switched, refuse_wrapped
from fastac.replay import Replay
from fastac.scopes import Tape, thread
from fastac.selective import COMPILED_CODE, Contexts, SelectiveRecord, traced_contexts
from fastac.tape import Record

logger = logging.getLogger("fastac")


def _census_of(record: Record | SelectiveRecord) -> Census:
    return record.census() if isinstance(record, SelectiveRecord) else Census.of_tape(record)


class Region:
    """One call of a block under checkpointing. It ends with the forward; the tape lives on in torch's recompute."""

    __slots__ = (
        "_known",
        "args",
        "block",
        "engine",
        "function",
        "key",
        "kwargs",
        "observer",
        "policy",
        "preserves_generators",
        "record",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy,
        engine: str = "tape",
        preserves_generators: bool = True,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.policy = policy
        self.engine = engine
        self.preserves_generators = preserves_generators
        self.record: Record | SelectiveRecord | None = None
        self.observer: Observer | None = None
        self.block = census.block_record(function)
        self.key = (engine, policy, census.signature(args), census.signature(kwargs) if kwargs else None)
        self._known: Census | None = None

    def contexts(self) -> Contexts:
        """torch's context_fn: what the forward and the recompute run under."""
        if torch_internals.in_proxy_trace() or any(map(torch_internals.is_fake, (*self.args, *self.kwargs.values()))):
            return traced_contexts(self.policy)
        interception.install_if_loaded()
        block = self.block
        if block is not None and block.latest_key == self.key:  # cheaper than hashing the key
            self._known = block.latest
        elif block is not None:
            self._known = block.censuses.get(self.key)
        if self._known is None:
            refuse_wrapped(self.function)
            refuse_switched(self.function, self.policy)
            self._known = census.known(self.function).get(self.key)
        if self._known is None:
            interception.install()
            partitioner.inform_if_loaded()
            if not is_compiled(self.function):
                self.observer = Observer(self.function, (self.args, self.kwargs), self.policy)
        if self.policy.linear:
            return self._contexts_with_linear(self.policy)
        if self.engine == "sac":
            if is_compiled(self.function):
                raise FastacError(COMPILED_CODE)
            self.record = selective = SelectiveRecord(self.policy, self.observer)
            self._be_told(selective)
            return selective, selective.replay
        tape = Tape()
        self.record = record = Record(tape, self.policy, self.preserves_generators, self.observer)
        self._be_told(record)
        return record, Replay(tape)

    def _contexts_with_linear(self, policy: Policy) -> Contexts:
        if self.engine != "tape":
            raise FastacError(
                f'engine="sac": {policy} is for the default engine, which knows which Linear module a product belongs '
                f"to. Leave engine out, or use a policy of attention alone."
            )
        linears = linear.Watched()
        if policy.linear and torch.is_grad_enabled():  # else torch asks for contexts that nobody enters
            linears = linear.watched(self.function, policy)
        tape = Tape()  # after that: it counts what is intercepted when it begins
        tape.linears, tape.watch = linears, functools.partial(linear.watch_again, linears)
        self.record = record = Record(tape, policy, self.preserves_generators, self.observer)
        self._be_told(record)
        return record, Replay(tape)

    def _be_told(self, record: Record | SelectiveRecord) -> None:
        if self.observer is not None:
            self.observer.progress = lambda: len(record.calls) + len(record.missed)
            self.observer.let_in = record.ops.let_in

    def check(self, outputs: Any) -> None:
        """Raise PolicyNotAppliedError when an attention call of the forward that the policy saves was not saved."""
        record, known = self.record, self._known
        if record is None or not record.entered:
            return  # gradients are off, here or around a reentrant checkpoint: there is nothing to save
        if record.calls and torch_internals.in_backward() and thread.scope is None:
            explanation.warn_of_outer_checkpoint(census.describe(self.function))
        if (
            known is None
            or record.missed
            or record.late
            or (known.ops != record.calls and record.calls not in known.others)
            or known.linear != record.products
            or (self.block is not None and self.key not in self.block.censuses and self._is_odd(record, known, outputs))
        ):
            self._settle(record, outputs)
        else:
            now = compiled_graphs.time()
            # A function that is no block may call another graph each time, for another layer.
            if now > 0 if self.block is None else now != self.block.looked:
                compiled_graphs.watch(autograd_graph.nodes_between(outputs, (self.args, self.kwargs)), self.policy)
            if self.block is not None:
                self.block.looked = now
            mine = known
            if known.keys != record.keys or known.linear != record.products:
                mine = dataclasses.replace(
                    _census_of(record), compiled=known.compiled, writing=known.writing, communicates=known.communicates
                )
            self._remember(record, mine)

    def _is_odd(self, record: Record | SelectiveRecord, known: Census, outputs: Any) -> bool:
        """Whether a block holds an attention that the first of its class did not, and that nothing recorded."""
        nodes = autograd_graph.nodes_between(outputs, (self.args, self.kwargs))
        compiled = autograd_graph.ran_compiled_code(nodes) and not known.compiled
        return compiled or bool(autograd_graph.hidden_functions(nodes, record.owners, self.policy))

    def _settle(self, record: Record | SelectiveRecord, outputs: Any) -> None:
        """The slow way: the first region of its kind, or one that recorded other calls than its kind did before."""
        known = self._known
        mine = _census_of(record)
        where = census.describe(self.function)
        late = [*opaque.make_known_visible(), *interception.install(), *record.late]
        seen: Observer | diagnosis.Look | None = self.observer
        nodes = autograd_graph.nodes_between(outputs, (self.args, self.kwargs))
        hidden = autograd_graph.hidden_functions(nodes, record.owners, self.policy)
        if hidden and self.observer is not None:  # loaded, and called before the next op could tell of it
            late += self.observer.joined
        compiled = (
            is_compiled(self.function) or autograd_graph.ran_compiled_code(nodes) or self._called_compiled(record)
        )
        watched = self.observer or known
        writing = tuple(watched.writing) if watched is not None else ()
        communicates = self._communicates(record)
        mine = dataclasses.replace(mine, compiled=compiled, writing=writing, communicates=communicates)
        compiled_graphs.watch(nodes, self.policy)
        if self.block is not None:
            self.block.looked = compiled_graphs.time()
        if seen is not None:
            explanation.warn_of_cut_off(autograd_graph.parameters_cut_off(self.function, nodes), where)
        if compiled or hidden or (seen is None and (known is None or record.missed or len(mine.ops) < len(known.ops))):
            # Compiled code can not be watched, and a region that makes fewer calls than it should was not.
            seen = self._look_again(record, compiled)
            if compiled:
                diagnosis.leave_out_compiled_away(seen, record.calls, where)
            seen.hidden = list(dict.fromkeys(hidden + seen.hidden))
            seen.elsewhere += self.observer.elsewhere if self.observer is not None else []
            late += seen.late
        if late:
            logger.info("%s: the library of %s was loaded just now; saved from the next region on", where, late[0])
            return  # nothing is remembered: the next region is taken as the first of its kind
        if seen is not None:
            self._judge(record, mine, seen)
        if self.policy.linear and compiled:
            linear.refuse_compiled(self.function, self.policy)
        if self.policy.linear and isinstance(record, Record):
            before = self.block.censuses.get(self.key) if self.block is not None else None
            linear.judge(self.function, self.policy, record, before.linear if before else [], nodes)
        kinds = census.known(self.function)
        if len(kinds) >= census.MANY:
            kinds.clear()
        if kinds.setdefault(self.key, mine) is mine:
            ops = ", ".join(dict.fromkeys(call.op for call in mine.calls)) or "none"
            saved = sum(call.saved for call in mine.calls)
            logger.info("%s: %d attention calls, %d saved by %s (%s)", where, len(mine.calls), saved, self.policy, ops)
        elif self.block is None and known is not None and mine.ops not in known.others:
            known.others.append(mine.ops)
        self._remember(record, mine)

    def _look_again(self, record: Record | SelectiveRecord, compiled: bool = False) -> diagnosis.Look:
        """A second look, unless it would leave this rank alone in a collective, and all hanging.

        The first region of a class of compiled blocks is looked at again on every rank.
        """
        kinds = census.known(self.function).copy()  # other threads add to it
        if ranks.count() == 1 or not self._communicates(record) or (compiled and not kinds):
            return diagnosis.look_again(self.function, self.args, self.kwargs, self.policy, compiled)
        alike = [len(one.ops) for key, one in kinds.items() if key[:2] == self.key[:2]]
        return diagnosis.first_look(record.calls, record.missed, self.observer, min(alike, default=0))

    def _communicates(self, record: Record | SelectiveRecord) -> bool:
        """Whether the function issues collectives, as far as that is known."""
        if record.communication is not None:
            return True
        if self.observer is not None:
            return self.observer.communicates
        known = list(census.known(self.function).values())  # other threads add to it
        return any(one.communicates for one in known) or ranks.is_sharded(census.module_of(self.function))

    def _called_compiled(self, record: Record | SelectiveRecord) -> bool:
        """Whether it ran compiled code, also such as the graph does not show; eager flex_attention compiles itself."""
        own = sum(isinstance(resolved.op, torch._ops.HigherOrderOperator) for resolved in record.calls)
        return self.observer is not None and self.observer.compiled_calls.count > own

    def _judge(self, record: Record | SelectiveRecord, mine: Census, seen: Observer | diagnosis.Look) -> None:
        before = self.block.censuses.get(self.key) if self.block is not None else None
        expected = max(len(seen.ops), len(before.ops) if before is not None else 0)
        hidden = seen.hidden if isinstance(seen, diagnosis.Look) else []
        unsaved = record.missed or seen.missed or seen.unknown or seen.elsewhere or seen.silent or hidden
        if not unsaved and len(mine.ops) >= expected:
            return
        look = seen
        if isinstance(look, Observer):
            look = self._look_again(record)
            look.elsewhere = look.elsewhere or seen.elsewhere
        made = len(mine.ops)
        unseen = len(look.elsewhere) + len(look.hidden) + len(look.silent)
        expected = max(expected, made + unseen, len(look.ops) + len(look.missed) + len(look.unknown))
        raise PolicyNotAppliedError(explanation.explain(self.function, self.policy, look, made, expected))

    def _remember(self, record: Record | SelectiveRecord, mine: Census) -> None:
        for listener in census.listeners:
            listener(mine)
        block = self.block
        if block is not None:
            block.communication = record.communication
        if block is not None and block.latest is not mine:
            explanation.warn_of_compiler(self.function)
            if len(block.censuses) >= census.MANY:
                block.censuses.clear()
            block.latest = block.censuses[self.key] = mine
            block.latest_key = self.key
