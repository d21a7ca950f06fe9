"""Collectives in compiled code and in traced steps: what is saved is not issued again there either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile

import fastac
import fastac.graph
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import EXCHANGES, part_of_inputs, ulysses_stack
from tests.graph.steps import step_of

LAYERS = 2
ATTENTION = 2 * LAYERS
ALL_TO_ALLS = EXCHANGES * ATTENTION

AGAIN = Policy("attn_only", collectives="recompute")


POLICIES: dict[Any, int] = {"none": 0, "attn_only": 0, AGAIN: ALL_TO_ALLS, "full": ALL_TO_ALLS}
"""Policy -> all-to-alls that recompute issues again."""


def _compiled(what: str, backend: str, policies: list[Any], layers: int) -> list[steps.Measured]:
    """The second step under each policy."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    found = []
    for policy in policies:
        torch._dynamo.reset()
        model, inputs = ulysses_stack(layers), part_of_inputs()
        called: Any = model
        if what == "blocks":
            if policy != "none":
                fastac.enable(model, policy, blocks="blocks")
            for block in model.blocks:
                block.compile(backend=backend)
        else:
            model.policy = policy
            called = torch.compile(model, backend=backend)
        for _ in range(2):
            one = steps.measured(called, inputs)
        one.tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in one.tensors.items()}
        found.append(one)
    return found


def assert_compiled(folder: Path, what: str, backend: str, policies: list[Any], layers: int = LAYERS) -> None:
    """Exact, and with no exchange issued again that the policy saves."""
    found, _ = ranks.run(folder, _compiled, what, backend, policies, layers, patience=280)
    for policy, one in zip(policies, found, strict=True):
        issued = (ALL_TO_ALLS + POLICIES[policy]) * layers // LAYERS
        assert one.backward == {"gloo:all_to_all": issued}, policy
        assert one.tensors.keys() == found[0].tensors.keys()
        for name, tensor in found[0].tensors.items():
            assert support.relative_error(one.tensors[name], tensor) < 1e-5, f"{policy}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled(what: str, tmp_path: Path) -> None:
    assert_compiled(tmp_path, what, "aot_eager", list(POLICIES))


@pytest.mark.slow
def test_compiled_by_inductor(tmp_path: Path) -> None:
    """It uses the memory of one result for another, once nobody needs it: what is kept is a copy."""
    assert_compiled(tmp_path, "blocks", "inductor", ["none", "attn_only"], layers=1)


def _traced() -> tuple[dict[str, torch.Tensor], list[tuple[dict[str, torch.Tensor], int]]]:
    """A step in eager mode, and traced under each policy."""
    model, inputs = ulysses_stack(LAYERS), part_of_inputs()
    expected = _copies(step_of(model)(**inputs))
    model.policy = "attn_only"
    found = []
    for policy in list(POLICIES)[1:]:
        traced = fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs), policy)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            outputs = traced(**inputs)
        events: Any = profiled.events()
        found.append((_copies(outputs), sum(event.name == "gloo:all_to_all" for event in events)))
    return expected, found


def _copies(values: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in support.flat_tensors(values, "step").items()}


def test_traced_steps(tmp_path: Path) -> None:
    (expected, found), _ = ranks.run(tmp_path, _traced)
    for (policy, again), (tensors, count) in zip(list(POLICIES.items())[1:], found, strict=True):
        support.assert_same(tensors, expected)
        assert count == 2 * ALL_TO_ALLS + again, policy
