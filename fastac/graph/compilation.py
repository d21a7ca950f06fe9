"""compile: a step with a policy applied, through inductor, which must leave the recomputation where it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph.internals import tracing_autograd_calls
from fastac.graph.liveness import peak_bytes
from fastac.graph.nodes import is_attention
from fastac.graph.tracing import Traced

AS_IT_IS = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""What inductor must be told: both move recomputed operators to where the forward has others of their inputs."""

HIGHER = 1.1
"""How much more memory a graph may need after inductor's passes than before."""


def compile(traced: Traced, **options: Any) -> Traced:  # noqa: A001
    """The same step, compiled by inductor at its first call.

    options: of inductor, as for torch.compile. Results are inductor's: equal up to rounding, dropout of its own.
    Raises PolicyNotAppliedError at that call when a pass of inductor, or one among the options, changed how often
    attention runs or undid the recomputation.
    """
    if not isinstance(traced.graph_module, GraphModule):
        raise FastacError("compile: this step is compiled already")
    look = _Look(_attention(traced.graph_module.graph))
    compiled = torch.compile(traced.graph_module, fullgraph=True, dynamic=False, options=look.options(options))
    return dataclasses.replace(traced, graph_module=_Compiled(compiled, look))


def compile_step(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A training step through torch.compile alone, with `torch.autograd.grad` in the compiled graph.

    step: as for `trace`; its model's blocks are checkpointed by fastac. dynamo takes the place of the tracer, and torch
    has the pass that recomputes: one backward, no dropout in the regions, no policy but that of the regions.
    options: of inductor. Raises PolicyNotAppliedError as `compile` does, and for attention that can not be saved.
    """
    look = _Look(None)
    compiled = _Compiled(torch.compile(step, fullgraph=True, dynamic=False, options=look.options(options)), look)

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        with tracing_autograd_calls():
            return compiled(*args, **kwargs)

    return call


def _one_after_the_other(passes: Sequence[Callable[[Graph], None] | None], graph: Graph) -> None:
    for one in filter(None, passes):
        one(graph)


class _Look:
    """Looks at the graph before inductor's passes, when operators are in small parts already, and after them."""

    def __init__(self, attention: int | None) -> None:
        self.counted_before = attention is not None
        self.attention = attention
        self.bytes: int | None = None
        self.ran = False
        self.failure: PolicyNotAppliedError | None = None

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options of inductor under which it looks; passes among the given ones run in between."""
        options = {**AS_IT_IS, **given}
        first, last = options.get("joint_custom_pre_pass"), options.get("post_grad_custom_post_pass")
        options["joint_custom_pre_pass"] = functools.partial(_one_after_the_other, (self.before, first))
        options["post_grad_custom_post_pass"] = functools.partial(_one_after_the_other, (last, self.after))
        return options

    def before(self, graph: Graph) -> None:
        """Raise PolicyNotAppliedError when attention runs more or less often than in the traced graph."""
        self.bytes = peak_bytes(graph)
        if not self.counted_before:
            self.attention = _attention(graph)
        self._check(graph)

    def after(self, graph: Graph) -> None:
        """The same, and when the graph needs more memory than before."""
        self.ran = self.bytes is not None
        self._check(graph)

    def _check(self, graph: Graph) -> None:
        attention, size = _attention(graph), peak_bytes(graph)
        before = size if self.bytes is None else self.bytes
        if attention != self.attention or size > HIGHER * before:
            self.failure = PolicyNotAppliedError(
                f"compile: after inductor's passes the graph runs attention {attention} times and needs "
                f"{size / 2**20:.2f} MiB for what it computes; it was {self.attention} times and "
                f"{before / 2**20:.2f} MiB. A pass moved or merged what is recomputed in the backward (common "
                f"subexpressions, reorder_for_locality): switch it off, or run the step without compile."
            )
            raise self.failure


def _attention(graph: Graph) -> int:
    return sum(map(is_attention, graph.nodes))


class _Compiled:
    """What inductor made, once it was looked at."""

    def __init__(self, function: Any, look: _Look) -> None:
        self.function = function
        self.look = look

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            outputs = self.function(*inputs, **named)
        except Exception as error:
            if self.look.failure is not None:  # inductor has wrapped it
                raise self.look.failure from error
            raise
        if not self.look.ran:
            raise PolicyNotAppliedError(
                "compile: inductor did not show what it compiled (its graph came from a cache, or passes are switched "
                "off), so nobody knows whether the recomputation is in it."
            )
        return outputs
