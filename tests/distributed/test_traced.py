"""Collectives in compiled code and in traced steps: what is saved is not issued again there either."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

import fastac
import fastac.graph
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import EXCHANGES, part_of_inputs, ulysses_stack
from tests.graph.steps import step_of

LAYERS = 1
ALL_TO_ALLS = EXCHANGES * 2 * LAYERS

POLICIES: dict[Any, int] = {
    "none": 0,
    "attn_only": 0,
    Policy("attn_only", collectives="recompute"): ALL_TO_ALLS,
    "full": ALL_TO_ALLS,
}
"""Policy -> all-to-alls that recompute issues again."""


def _traced() -> tuple[support.Tensors, list[tuple[support.Tensors, int]]]:
    """A step in eager mode, and traced under each policy."""
    model, inputs = ulysses_stack(LAYERS), part_of_inputs()
    expected = _copies(step_of(model)(**inputs))
    model.policy = "attn_only"
    found = []
    for policy in list(POLICIES)[1:]:
        traced = fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs), policy)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            outputs = traced(**inputs)
        found.append((_copies(outputs), steps.collectives(profiled)["gloo:all_to_all"]))
    return expected, found


def _copies(values: Any) -> support.Tensors:
    return {name: tensor.detach().clone() for name, tensor in support.flat_tensors(values, "step").items()}


def test_traced_steps() -> None:
    (expected, found), _ = ranks.run(_traced)
    for (policy, again), (tensors, count) in zip(list(POLICIES.items())[1:], found, strict=True):
        support.assert_same(tensors, expected)
        assert count == 2 * ALL_TO_ALLS + again, policy
