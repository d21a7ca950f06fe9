"""Regions that dynamo puts into a graph: what is done while it traces, and the contexts that AOT asks for."""

from __future__ import annotations

import torch

from fastac import census, interception, partitioner, torch_internals
from fastac.decisions import traced_failure
from fastac.errors import CompiledPolicyNotAppliedError
from fastac.observation import Observer
from fastac.policy import Policy
from fastac.replay import Replay
from fastac.scopes import Tape
from fastac.selective import Contexts, traced_contexts
from fastac.tape import Record


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # runs while dynamo traces
def prepare() -> None:
    """Load plugins and make known kernels visible, which must not happen under AOT's modes."""
    interception.install()
    partitioner.inform_if_loaded()


def contexts_while_tracing(policy: Policy) -> Contexts:
    """The contexts of a region that dynamo put into a graph; called by AOT, or at run time by a backend without AOT."""
    if torch_internals.in_proxy_trace():
        return traced_contexts(policy)
    interception.install()
    tape = Tape()
    return _RecordInGraph(tape, policy, observer=Observer(None, (), policy)), Replay(tape)


class _RecordInGraph(Record):
    """The forward of a region whose function is not known, only a graph of it: watched and checked every time.

    AOT runs one, too, on stand-ins, before it traces.
    """

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        observer = self.observer
        if exception[0] is None and isinstance(observer, Observer):
            small = [missed.attention for missed in [*self.missed, *(missed for _, missed in observer.missed)]]
            if small or observer.unknown:
                raise CompiledPolicyNotAppliedError(traced_failure(self.policy, small, observer.unknown))
            if self.calls:  # of a backend without AOT: the graph really runs
                for listener in census.listeners:
                    listener(census.Census.of_tape(self))
