"""Selective checkpointing on a traced training step: the case of torchtitan's pull request 2766.

A step is traced with forward, loss and backward in one graph, regions are marked, a pass recomputes them but for what
is saved, and the graph runs without autograd. Asked for there: peak memory at or below that of eager selective
checkpointing, with bitwise equal losses and gradients, the tracer free of checkpointing, the pass in the user's hands.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fastac
import fastac.graph
from tests import support
from tests.graph_models import Llama, step_of
from tests.live_bytes import peak_of


class Case(NamedTuple):
    """calls: attention of a step, all in the regions."""

    build: Callable[[], tuple[torch.nn.Module, dict[str, Any]]]
    blocks: str | None
    calls: int


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Llama(), {"tokens": torch.randint(100, (1, 256))}


CASES = {
    "Wan": Case(functools.partial(support.build, "WanTransformer3DModel"), None, 4),
    "Llama": Case(llama, "layers", 4),
}


class Measured(NamedTuple):
    """The loss and gradients of a step, the most bytes alive in it, attention executions."""

    results: tuple[torch.Tensor, ...]
    peak: int
    executions: int


def measure(case: Case, policy: str | None, graph: bool = False) -> Measured:
    model, inputs = case.build()
    if policy is not None:
        fastac.enable(model, policy, blocks=case.blocks)
    step: Callable[..., Any] = step_of(model)
    if graph:
        step = fastac.graph.apply(fastac.graph.trace(step, model, **inputs))
    support.count_cpu_attention()
    support.executions.clear()
    loss, gradients = step(**inputs)
    executions = support.executions.total()
    results = (loss.detach(), *gradients)
    gc.collect()
    peak = peak_of(lambda: step(**inputs), [model.state_dict(), inputs])
    return Measured(results, peak, executions)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name != "Llama")) for name, case in CASES.items()]
)
def test_the_graph_needs_no_more_memory_than_eager_mode(case: Case) -> None:
    none = measure(case, None)
    eager, graph = (measure(case, "attn_only", graph) for graph in (False, True))
    full = measure(case, "full", graph=True)
    assert all(map(torch.equal, eager.results, none.results))
    assert all(map(torch.equal, graph.results, none.results))
    assert (none.executions, eager.executions, graph.executions, full.executions) == (case.calls,) * 3 + (
        2 * case.calls,
    )
    assert graph.peak <= eager.peak < none.peak
