"""What a region keeps waits on the host beside everything else. Ranks: tests/distributed.

The ways of training are those of the tests here and in tests/hook, which find another policy by the name of attn_only.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
import fastac.graph
from fastac import Policy
from fastac import policy as policies
from fastac.errors import CompiledPolicyNotAppliedError
from fastac.models.published import LORA_TARGETS
from tests import compiler
from tests.compile import steps as compiled
from tests.engine.simulated import Simulated, simulated
from tests.graph.steps import traced_step
from tests.hook import test_patch as patched
from tests.marks import NEEDS_COMPILED_MODELS, NEEDS_TRACES
from tests.support import CPU_ATTENTION, assert_same, stack, stack_inputs, train_step
from tests.ways import test_block_swap as swapped
from tests.ways import test_changed_before_backward as changed
from tests.ways import test_copies_and_files as copies
from tests.ways import test_fine_tuning as fine_tuning
from tests.ways import test_memory as memory
from tests.ways import test_sampling as sampling
from tests.ways import test_several_models as several
from tests.ways import test_switching as switching
from tests.ways.recipes import Run, adamw, adapt, assert_exact_and_saved, batches, build

OFFLOADED = Policy("attn_only", offload=True, keep=1)
"""Of the two blocks of a tiny model the first goes to the host."""


@pytest.fixture(autouse=True)
def device() -> Iterator[Simulated]:
    with simulated() as found:
        yield found
        assert not found.faults


# The neighbours' trainings

case = functools.partial
WAYS: dict[str, Callable[..., None]] = {
    "LoRA": case(fine_tuning.test_lora, "get_peft_model", "all-linear", 0.3, "after"),
    "buckets": case(fine_tuning.test_gradient_accumulation),
    "text in the sequence": case(fine_tuning.test_full_fine_tuning, fine_tuning.COGVIDEOX),
    "layers in float8": case(memory.test_layerwise_casting, "before", "first"),
    "groups": case(memory.test_group_offloading, "all", "leaves", "after"),
    "groups, on disk": case(swapped.test_group_offloading_to_disk, "block", "adapter", "blocks", True),
    "block swap": case(swapped.test_block_swap),
    "cpu_offload": case(swapped.test_cpu_offload, "diffusers"),
    "policies that change": case(switching.test_another_policy_in_every_step_and_none_at_last),
    "disabled before backward": case(switching.test_a_policy_counts_from_the_next_forward_on, "attn_only", None),
    "weights changed before backward": case(
        changed.test_a_change_is_an_error, changed.weights_stepped, changed.Wan, "attn_only"
    ),
    "EMA": case(copies.test_ema_by_deepcopy),
    "two models": case(several.test_generator_and_discriminator),
    "samples": case(sampling.test_sampling_between_steps, torch.inference_mode, True),
    "patch_checkpoint": case(patched.test_names, patched.by_name),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, device: Simulated, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, with attention run once, as the test itself has it."""
    monkeypatch.setitem(policies.NAMED, "attn_only", OFFLOADED)
    monkeypatch.setattr(swapped, "SAVED", {OFFLOADED: ANY})
    run = WAYS[way]
    run(**{name: request.getfixturevalue(name) for name in inspect.signature(run).parameters})
    assert device.allocated > 0


def test_adapters_with_accumulation_under_autocast(device: Simulated) -> None:
    def recipe(run: Run) -> None:
        model, batch = build()
        adapt(model, LORA_TARGETS)
        run.enable(model, OFFLOADED)
        optimizer = adamw(model)

        def forward(**inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model(**inputs)

        for _ in range(2):
            run.step(model, *batches(batch, 3), optimizer=optimizer, forward=forward)

    assert_exact_and_saved(recipe, forwards=3, with_full=False)
    assert device.allocated > 0


# Policies per block

LAYERS = 4
FIRST = fastac.first_blocks(stack(layers=LAYERS), 3, OFFLOADED, blocks="blocks")
EACH: dict[str, tuple[Any, int, list[bool]]] = {
    "mapping": ({"blocks.0": "full", "*": OFFLOADED}, 2, [False, True, True, False]),
    "first blocks": (FIRST, 0, [True, True, False, False]),
    "inputs": ({"blocks.3": "none", "*": Policy("full", offload="inputs", keep=1)}, 6, [False, True, False, False]),
}
"""Policies by block -> attention that runs again, and the blocks that send something to the host."""


@pytest.mark.parametrize("name", EACH)
def test_policies_per_block(name: str, attention_executions: Counter[str]) -> None:
    policy, again, gone = EACH[name]
    expected = train_step(stack(layers=LAYERS), stack_inputs())
    model: Any = stack(layers=LAYERS)
    fastac.enable(model, policy, blocks="blocks")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, stack_inputs()), expected)
        assert attention_executions == {CPU_ATTENTION: 2 * LAYERS + again}
        transfers = [block._fastac_record.transfers for block in model.blocks]
        assert [one is not None and one.host_bytes > 0 for one in transfers] == gone


# Copies


def by_pickle(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


@pytest.mark.parametrize("when", ["before a step", "after a forward", "after a step"])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_copies(copied: Callable[[Any], Any], when: str, device: Simulated, attention_executions: Counter[str]) -> None:
    expected = train_step(stack(layers=LAYERS), stack_inputs())
    model = stack(layers=LAYERS)
    fastac.enable(model, OFFLOADED, blocks="blocks")
    if when == "after a step":
        train_step(model, stack_inputs())
    loss = model(**stack_inputs()).sum() if when == "after a forward" else None
    other = copied(model)
    if loss is not None:
        loss.backward()
        assert next(other.parameters()).grad is None
    attention_executions.clear()
    for one in (other, model, other):
        assert_same(train_step(one, stack_inputs()), expected)
    assert attention_executions == {CPU_ATTENTION: 3 * 2 * LAYERS}
    moved, again = (fastac.report(one).rows[0].offloaded for one in (model, other))
    assert moved is not None
    assert again is not None
    assert moved.host_bytes == again.host_bytes > 0


# Compiled


def test_compiled_blocks(device: Simulated, tmp_path: Path) -> None:
    """Each inside its region, which is eager."""

    def build(policy: str) -> torch.nn.Module:
        model = compiled.small("none", layers=3)
        if policy == "none":
            return compiled.compile_blocks(model, "aot_eager")
        fastac.compile(model, OFFLOADED, blocks="blocks", backend="aot_eager", dynamic=False)
        return model

    with compiler.fresh(tmp_path):
        compiled.assert_exact_and_saved(build, compiled.small_inputs(), calls=3, looks=1)
    assert device.allocated > 0


def whole(backend: str) -> None:
    model = stack()
    fastac.enable(model, OFFLOADED, blocks="blocks")
    torch.compile(model, backend=backend)(**stack_inputs())


REFUSED: dict[str, Callable[[], Any]] = {
    "compiled model": case(whole, "aot_eager"),
    "compiled model, without AOT": case(whole, "eager"),
    "make_fx": lambda: make_fx(stack(policy=OFFLOADED))(*stack_inputs().values()),
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
