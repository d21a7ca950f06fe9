"""compile: a step with a policy applied, through inductor, which must leave the recomputation where it is."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fastac.compile import torch_private
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.graph import fusion, internals
from fastac.graph.liveness import peak_bytes
from fastac.graph.nodes import is_attention, is_of_region
from fastac.graph.summary import is_recomputing
from fastac.graph.tracing import Traced

logger = logging.getLogger("fastac")

AS_IT_IS = {"reorder_for_locality": False, "reorder_for_peak_memory": False, "combo_kernels": False}
"""What inductor must be told: two move recomputed operators to where the forward has others of their inputs, one makes
kernels of operators far from each other."""

UNSEEN = ("reorder_for_peak_memory", "combo_kernels")
"""Those of them that act after the last look."""

HIGHER = 1.1
"""How much more memory the regions of a graph may need after inductor's passes than before."""


def compile(traced: Traced, **options: Any) -> Traced:  # noqa: A001
    """The same step, compiled by inductor at its first call.

    options: of inductor, as for torch.compile. Results are inductor's: equal up to rounding, dropout of its own.
    Raises PolicyNotAppliedError at that call when a pass of inductor, or one among the options, changed how often
    attention runs or undid the recomputation.
    """
    if not isinstance(traced, Traced):
        raise FastacError(
            f"compile: expected a step that fastac.graph.apply returned, got {type(traced).__name__}. A step "
            f"that is no graph so far is compiled by fastac.graph.compile_step(step)."
        )
    graph_module = traced.graph_module
    if not isinstance(graph_module, GraphModule):
        raise FastacError("compile: this step is compiled already. Pass the one that fastac.graph.apply returned.")
    if traced.policies is None and not is_recomputing(graph_module):
        raise PolicyNotAppliedError(
            "compile: this step has no policy, so nothing would be recomputed: "
            "fastac.graph.compile(fastac.graph.apply(traced, ...))"
        )
    look = _Look(_attention(graph_module.graph))
    return dataclasses.replace(
        traced, graph_module=_Compiled(_through_inductor("compile", graph_module, look, options), look, graph_module)
    )


def compile_step(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A training step through torch.compile alone, with `torch.autograd.grad` in the compiled graph.

    step: as for `trace`; its model's blocks are checkpointed by fastac. dynamo takes the place of the tracer, and torch
    has the pass that recomputes: one backward, no dropout in the regions, no policy but that of the regions.
    options: of inductor. Calls raise PolicyNotAppliedError as `compile` does, for a step without regions, and for
    attention that can not be saved; FastacError for what dynamo can not take into one graph.
    """
    if isinstance(step, Traced) or not callable(step):
        raise FastacError(
            f"compile_step: expected a training step, a function, got {type(step).__name__}. What fastac.graph.apply "
            f"returned is compiled by fastac.graph.compile."
        )
    look = _Look(None)
    compiled = _Compiled(_through_inductor("compile_step", step, look, options), look)

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with internals.tracing_autograd_calls():
                return compiled(*args, **kwargs)
        except internals.Unsupported as error:
            raise _not_one_graph(error) from error
        except internals.BackendFailed as error:
            raise FastacError(
                f"compile_step: torch's pass can not recompute in this step. It takes attention kernels for operators "
                f'that draw random numbers, so that it can not recompute one (policy "full", min_kv=..., '
                f"FASTAC_DISABLE=1), nor dropout, nor take two backwards; fastac.graph.trace, apply and compile do. "
                f"torch says: {_first_lines(error)}"
            ) from error

    return call


def _through_inductor(name: str, function: Any, look: _Look, options: dict[str, Any]) -> Any:
    try:
        return torch.compile(function, fullgraph=True, dynamic=False, options=look.options(options))
    except RuntimeError as error:
        raise FastacError(
            f"{name} takes inductor's options only, by their names in torch._inductor.config, e.g. max_autotune=True: "
            f"no mode, backend, policy, or options={{...}}. "
            f"torch says: {str(error).partition(', known options')[0]}"
        ) from error


def _not_one_graph(error: Exception) -> FastacError:
    if internals.CONSUMED in str(error):
        return FastacError(
            "compile_step: the step returns a tensor whose graph torch.autograd.grad has used up, such as the loss, "
            "and a compiled step can not return it with its graph. Return it detached: return loss.detach(), gradients."
        )
    return FastacError(
        f"compile_step: the step must be one graph, and dynamo can not take this into it. Take it out. torch says: "
        f"{_first_lines(error)}"
    )


def _first_lines(error: Exception) -> str:
    """What an error of torch's says before it lists what else there is to know."""
    return str(error).partition("For even more developer context")[0].partition("Set TORCHDYNAMO_VERBOSE")[0].strip()


class _Look:
    """Looks at the graph before inductor's passes, when operators are in small parts already, and after them."""

    def __init__(self, attention: int | None) -> None:
        self.counted_before = attention is not None
        self.attention = attention
        self.bytes: tuple[int, int] | None = None
        self.ran = False
        self.failure: PolicyNotAppliedError | None = None

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options of inductor under which it looks; passes among the given ones run in between."""
        for name in UNSEEN:
            if given.get(name):
                raise FastacError(
                    f"{name}=True: inductor's scheduler would move what is recomputed for one region to that of "
                    f"another, or to the forward, after fastac has looked. Leave it out."
                )
        options = {**AS_IT_IS, **given}
        first, last = "joint_custom_pre_pass", "post_grad_custom_post_pass"
        options[first] = [self.before, *torch_private.passes(options, first)]
        options[last] = [*torch_private.passes(options, last), self.after]
        others = torch_private.passes(options, internals.POST_FUSION)
        options[internals.POST_FUSION] = functools.partial(self.fused, others)
        return options

    def before(self, graph: Graph) -> None:
        """Raise PolicyNotAppliedError when attention runs more or less often than in the traced graph."""
        self.ran, self.bytes = False, _peaks(graph)
        if not self.counted_before:
            self.attention = _attention(graph)
            if not any(map(is_of_region, graph.nodes)):
                self.failure = PolicyNotAppliedError(
                    "compile_step: no checkpointed region is in the step, so nothing would be recomputed. Call "
                    "fastac.enable(model) first."
                )
                raise self.failure
        self._check(graph)

    def after(self, graph: Graph) -> None:
        """The same, and when the regions need more memory than before."""
        self.ran = self.bytes is not None
        total = self._check(graph)
        if self.bytes is not None and total > HIGHER * self.bytes[1]:
            logger.warning(
                "compile: inductor's passes make the step need %.2f MiB in place of %.2f. It is not the checkpointed "
                "regions that need more: a pass holds something else for longer, as it would without fastac.",
                total / 2**20,
                self.bytes[1] / 2**20,
            )
        fusion.number_parts(graph)

    def fused(self, others: Sequence[Callable[[list[Any]], list[Any]]], scheduled: list[Any]) -> list[Any]:
        """Raise PolicyNotAppliedError when a kernel computes what several regions recompute."""
        for one in others:
            scheduled = one(scheduled)
        mixed = fusion.mixed(scheduled)
        if mixed:
            self.failure = PolicyNotAppliedError(
                f"compile: inductor fused what several regions recompute, so that their tensors are all there at one "
                f"time, in {len(mixed)} kernels, first {mixed[0]}. It does not ask for each of these fusions (torch "
                f"{torch.__version__}), or a pass of yours made them: max_fusion_size=1 switches all fusion off."
            )
            raise self.failure
        return scheduled

    def _check(self, graph: Graph) -> int:
        attention, (size, total) = _attention(graph), _peaks(graph)
        before = size if self.bytes is None else self.bytes[0]
        if attention != self.attention or size > HIGHER * before:
            self.failure = PolicyNotAppliedError(
                f"compile: after inductor's passes the graph runs attention {attention} times and needs "
                f"{size / 2**20:.4g} MiB for what its regions compute; it was {self.attention} times and "
                f"{before / 2**20:.4g} MiB. A pass moved or merged what is recomputed in the backward: common "
                f"subexpressions, reorder_for_locality, or, in a step that adds gradients up, inductor's patterns "
                f"(pattern_matcher=False). Switch it off, or run the step without compile."
            )
            raise self.failure
        return total


def _peaks(graph: Graph) -> tuple[int, int]:
    """The most bytes alive of what the regions compute, and of everything."""
    return peak_bytes(graph, is_of_region), peak_bytes(graph)


def _attention(graph: Graph) -> int:
    return sum(map(is_attention, graph.nodes))


class _Compiled:
    """What inductor made, once it was looked at. graph_module: of what, where it was traced before."""

    def __init__(self, function: Any, look: _Look, graph_module: GraphModule | None = None) -> None:
        self.function = function
        self.look = look
        self.graph_module = graph_module

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.look.failure = None
        try:
            with fusion.within_parts():
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
