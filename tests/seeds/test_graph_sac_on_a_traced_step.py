"""Selective checkpointing on a traced training step: the case of torchtitan's pull request 2766.

Asked for there: a peak of memory no higher than that of eager selective checkpointing, losses and gradients bitwise
equal, a tracer without checkpointing, and the pass in the user's hands. benchmarks/graph_memory.py measures Wan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import fastac
import fastac.graph
from tests import support
from tests.graph_models import Llama, step_of
from tests.live_bytes import peak_of

Measured = tuple[tuple[torch.Tensor, ...], int, int]
"""Loss and gradients of a step, attention executions, and the most bytes alive."""


def measure(policy: str | None, graph: bool = False) -> Measured:
    torch.manual_seed(0)
    model, inputs = Llama(), {"tokens": torch.randint(100, (1, 256))}
    if policy is not None:
        fastac.enable(model, policy, blocks="layers")
    step: Callable[..., Any] = step_of(model)
    if graph:
        step = fastac.graph.apply(fastac.graph.trace(step, model, **inputs))
    support.count_cpu_attention()
    support.executions.clear()
    loss, gradients = step(**inputs)
    executions = support.executions.total()
    results = (loss.detach(), *gradients)
    gc.collect()
    return results, executions, peak_of(lambda: step(**inputs), [model.state_dict(), inputs])


def test_the_graph_needs_no_more_memory_than_eager_mode() -> None:
    results, executions, peak = measure(None)
    eager, graph = (measure("attn_only", graph) for graph in (False, True))
    for found in (eager, graph):
        assert all(map(torch.equal, found[0], results))
        assert found[1] == executions == 4
    assert graph[2] <= eager[2] < peak
