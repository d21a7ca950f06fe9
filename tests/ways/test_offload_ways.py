"""Offload beside other ways to train: tests of this folder, with attn_only replaced by a policy that offloads.

Ranks: tests/distributed. Cases of one region: tests/engine/test_offload.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import fastac
import fastac.graph
from fastac import Policy
from fastac.errors import CompiledPolicyNotAppliedError
from tests import compiler
from tests.compiled import steps as compiled
from tests.engine.simulated import Simulated, simulated
from tests.graph.steps import traced_step
from tests.marks import NEEDS_COMPILED_MODELS, NEEDS_TRACES
from tests.support import executions_of, stack, stack_inputs, train_step
from tests.ways import recipes
from tests.ways import test_block_swap as swapped
from tests.ways import test_fine_tuning as fine_tuning

OFFLOADED = Policy("attn_only", offload=True, keep=1)
"""Of the two blocks of a tiny model the first goes to the host."""


@pytest.fixture(autouse=True)
def device() -> Iterator[Simulated]:
    with simulated() as found:
        yield found
        assert not found.faults


# Trainings of other tests

case = functools.partial
WAYS: dict[str, Callable[..., None]] = {
    "LoRA": case(fine_tuning.test_lora, "all-linear", 0.3, "after"),
    "layers in float8": case(fine_tuning.test_layerwise_casting, "before", "first"),
    "groups, on disk": case(swapped.test_group_offloading_to_disk, "block", "adapter", "blocks", True),
    "block swap": case(swapped.test_block_swap),
    "disabled before backward": case(fine_tuning.test_a_policy_counts_from_the_next_forward_on, True),
    "two models": case(fine_tuning.test_generator_and_discriminator),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, device: Simulated, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.POLICIES, "attn_only", OFFLOADED)
    monkeypatch.setattr(swapped, "SAVED", {OFFLOADED: ANY})
    run = WAYS[way]
    run(**{name: request.getfixturevalue(name) for name in inspect.signature(run).parameters})
    assert device.allocated > 0


# Policies per block

LAYERS = 4
FIRST = fastac.first_blocks(stack(layers=LAYERS), 3, OFFLOADED, blocks="blocks")
EACH: list[tuple[Any, int, list[bool]]] = [
    ({"blocks.0": "full", "*": OFFLOADED}, 2, [False, True, True, False]),
    (FIRST, 0, [True, True, False, False]),
    ({"blocks.3": "none", "*": Policy("full", offload="inputs", keep=1)}, 6, [False, True, False, False]),
]
"""Policies by block -> attention that runs again, and the blocks that send something to the host."""


def test_policies_per_block() -> None:
    """One after the other on one model."""
    expected = train_step(stack(layers=LAYERS), stack_inputs())
    model: Any = stack(layers=LAYERS)
    for policy, again, gone in EACH:
        fastac.enable(model, policy, blocks="blocks")
        for _ in range(2):
            assert executions_of(model, stack_inputs(), expected) == 2 * LAYERS + again
            transfers = [block._fastac_state.transfers for block in model.blocks]
            assert [one is not None and one.host_bytes > 0 for one in transfers] == gone


# Compiled


def test_compiled_blocks(device: Simulated, tmp_path: Path) -> None:
    """Compiled code inside an eager region."""

    def build(policy: str) -> torch.nn.Module:
        model = compiled.small("none", layers=3)
        if policy == "none":
            return compiled.compile_blocks(model, "aot_eager")
        fastac.compile(model, OFFLOADED, blocks="blocks", backend="aot_eager", dynamic=False)
        return model

    with compiler.fresh(tmp_path):
        compiled.assert_exact_and_saved(build, compiled.small_inputs(), calls=3, looks=1)
    assert device.allocated > 0


REFUSED: dict[str, Callable[[], Any]] = {
    "compiled model": lambda: torch.compile(stack(policy=OFFLOADED), backend="aot_eager")(**stack_inputs()),
    "trace": lambda: traced_step(stack(policy=OFFLOADED), stack_inputs()),
    "apply": lambda: traced_step(stack(policy="full"), stack_inputs(), OFFLOADED),
    "partitioner": lambda: fastac.graph.partitioner(OFFLOADED),
}


@NEEDS_TRACES
@NEEDS_COMPILED_MODELS
@pytest.mark.parametrize("way", REFUSED)
def test_graphs_are_refused(way: str, tmp_path: Path) -> None:
    with compiler.fresh(tmp_path), pytest.raises(CompiledPolicyNotAppliedError, match="offload needs an eager region"):
        REFUSED[way]()
