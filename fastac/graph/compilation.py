"""compile: a step with a policy applied, through inductor, which must leave the recomputation where it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fastac.errors import FastacError, PolicyNotAppliedError
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
    look = _Look(traced.graph_module)
    given: dict[str, Any] = {**AS_IT_IS, **options}
    for name, own in (("joint_custom_pre_pass", look.before), ("post_grad_custom_post_pass", look.after)):
        given[name] = functools.partial(_one_after_the_other, [own, given.get(name)][:: 1 if "pre" in name else -1])
    compiled = torch.compile(traced.graph_module, fullgraph=True, dynamic=False, options=given)
    return dataclasses.replace(traced, graph_module=_Compiled(compiled, look))


def _one_after_the_other(passes: Sequence[Callable[[Graph], None] | None], graph: Graph) -> None:
    for one in filter(None, passes):
        one(graph)


class _Look:
    """Looks at the graph before inductor's passes, when operators are in small parts already, and after them."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.attention = _attention(graph_module.graph)
        self.bytes: int | None = None
        self.ran = False
        self.failure: PolicyNotAppliedError | None = None

    def before(self, graph: Graph) -> None:
        """Raise PolicyNotAppliedError when attention runs more or less often than in the traced graph."""
        self.bytes = peak_bytes(graph)
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

    def __call__(self, *inputs: Any) -> Any:
        try:
            outputs = self.function(*inputs)
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
