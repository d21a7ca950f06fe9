"""A policy that changes in mid-training, enabling again, and disabling: the numbers are those of one plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastac
from tests.model_state import state_of
from tests.support import assert_same
from tests.ways.recipes import ATTENTION, WAN, Run, adamw, assert_exact_and_saved, batches, build

SHARES: list[tuple[Any, float]] = [
    ("full", 1),
    ("attn_only", 0),
    ({"*blocks.0": "full", "*": "attn_only"}, 0.5),
    (fastac.Policy("attn_only", min_kv=1), 0),
    ({"*blocks.1": "attn_only", "*": "long_attn_only"}, 0.5),  # a tiny video is short
]
"""Policies and the share of attention in blocks that runs again under them, in the order of a training."""


def bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def plainly_trained(steps: int) -> tuple[Run, torch.nn.Module]:
    run = Run(None)
    model, batch = build()
    optimizer = adamw(model)
    for one in batches(batch, steps):
        run.step(model, one, optimizer=optimizer)
    return run, model


def test_another_policy_in_every_step_and_none_at_last() -> None:
    """disable leaves the model as it was before enable, and the weights as they came out of training."""
    steps = len(SHARES) + 1
    expected, plain = plainly_trained(steps)
    run = Run(None)
    model, batch = build()
    before = state_of(model)
    optimizer = adamw(model)
    *under_fastac, last = batches(batch, steps)
    for one, (policy, _) in zip(under_fastac, SHARES, strict=True):
        fastac.enable(model, policy)
        run.step(model, one, optimizer=optimizer)
    fastac.disable(model)
    assert state_of(model) == before
    run.step(model, last, optimizer=optimizer)
    assert_same(run.tensors, expected.tensors)
    assert bytes_of(model) == bytes_of(plain)
    calls = ATTENTION[WAN]
    assert run.executions == [calls + share * calls for _, share in SHARES] + [calls]


def test_enabled_before_every_step() -> None:
    """And twice before the first: enabling again changes nothing, and is undone by one disable."""

    def recipe(run: Run) -> None:
        model, batch = build()
        before = state_of(model)
        optimizer = adamw(model)
        run.enable(model)
        for one in batches(batch, 3):
            run.enable(model)
            run.step(model, one, optimizer=optimizer)
        fastac.disable(model)
        assert state_of(model) == before

    assert_exact_and_saved(recipe)


@pytest.mark.parametrize(("first", "second"), [("attn_only", "full"), ("full", "attn_only"), ("attn_only", None)])
def test_a_policy_counts_from_the_next_forward_on(first: str, second: str | None) -> None:
    """Switched, or disabled, between forward and backward: the step goes on as its forward began."""
    expected, _ = plainly_trained(steps=2)
    run = Run(None)
    model, batch = build()
    optimizer = adamw(model)

    def switch_and_backward(loss: torch.Tensor) -> None:
        fastac.disable(model) if second is None else fastac.enable(model, second)
        loss.backward()

    fastac.enable(model, first)
    for one in batches(batch, 2):
        run.step(model, one, optimizer=optimizer, backward=switch_and_backward)
    assert_same(run.tensors, expected.tensors)
    calls = ATTENTION[WAN]
    again = {"attn_only": 0, "full": calls, None: 0}
    assert run.executions == [calls + again[first], calls + again[second]]
