"""accelerate: `prepare` in either order with `enable`, mixed precision, accumulation, save_state and load_state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

import fastac
from tests import support
from tests.compiler import reset
from tests.conftest import forget_accelerate
from tests.support import assert_same
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    Run,
    adamw,
    adapt,
    assert_exact_and_saved,
    batches,
    build,
)


def accelerator_of(mixed_precision: str = "no", **options: Any) -> Accelerator:
    forget_accelerate()
    return Accelerator(cpu=True, mixed_precision=mixed_precision, **options)


@pytest.mark.parametrize(
    ("mixed_precision", "order"),
    [("no", "before prepare"), ("bf16", "after prepare"), ("bf16", "after prepare, unwrapped")],
)
def test_prepare(mixed_precision: str, order: str) -> None:
    """prepare puts its autocast around the model's forward; the recompute sees the same."""

    def recipe(run: Run) -> None:
        accelerator = accelerator_of(mixed_precision)
        model, batch = build()
        if order == "before prepare":
            run.enable(model)
        model, optimizer = accelerator.prepare(model, adamw(model))
        if order == "after prepare":
            run.enable(model)
        if order == "after prepare, unwrapped":
            run.enable(accelerator.unwrap_model(model))
        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer, backward=accelerator.backward)

    assert_exact_and_saved(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "order"), [("model", "after prepare"), ("blocks", "before prepare")])
def test_prepare_that_compiles(compiled: str, order: str) -> None:
    """With a dynamo plugin `prepare` returns another module: one around the model, or a model of compiled blocks."""

    def recipe(run: Run) -> None:
        reset()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=compiled == "blocks")
        accelerator = accelerator_of(dynamo_plugin=plugin)
        model, batch = build(COGVIDEOX)
        if order == "before prepare":
            run.enable(model)
        prepared, optimizer = accelerator.prepare(model, adamw(model))
        assert prepared is not model
        if order == "after prepare":
            run.enable(prepared)
        for one in batches(batch, 2):
            run.step(prepared, one, optimizer=optimizer, backward=accelerator.backward)
        assert fastac.report(prepared).active == (run.policy is not None)

    looks = ATTENTION[COGVIDEOX] // 2 if compiled == "blocks" else 0
    assert_exact_and_saved(recipe, COGVIDEOX, saved_again=[looks, 0], with_full=False)


def test_accumulation_clipping_and_a_schedule() -> None:
    """The loop of training scripts: the weights move at every third micro-batch."""

    def recipe(run: Run) -> None:
        accelerator = accelerator_of(gradient_accumulation_steps=3)
        model, batch = build()
        run.enable(model)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for number, one in enumerate(batches(batch, 6)):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            support.executions.clear()
            with accelerator.accumulate(model):
                loss = support.loss_of(model(**one))
                accelerator.backward(loss)
                run.executions.append(support.executions[support.CPU_ATTENTION])
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    run.keep(f"step {number}", {"norm": norm})
                run.keep(f"step {number}", {"loss": loss} | support.gradients(support.leaves_of(model, {})))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.keep(f"step {number} parameter", dict(model.named_parameters()))
            moved = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert moved == (number % 3 == 2)

    assert_exact_and_saved(recipe)


def test_save_state_and_load_state(tmp_path: Path) -> None:
    """Two steps, saved and loaded into a fresh model, two more: as four in one go. Adapters drop out."""

    def start(run: Run, seed: int) -> Any:
        accelerator = accelerator_of("bf16")
        model, batch = build(seed=seed)
        adapt(model)
        run.enable(model)
        return accelerator, *accelerator.prepare(model, adamw(model)), batch

    def recipe(run: Run, stops: bool = True) -> None:
        accelerator, model, optimizer, batch = start(run, seed=0)
        for number, one in enumerate(batches(batch, 4)):
            if stops and number == 2:
                folder = str(tmp_path / str(run.policy))
                accelerator.save_state(folder)
                accelerator, model, optimizer, _ = start(run, seed=8)
                accelerator.load_state(folder)
            run.step(model, one, optimizer=optimizer, backward=accelerator.backward)

    saved = assert_exact_and_saved(recipe)
    in_one_go = Run(None)
    recipe(in_one_go, stops=False)
    assert_same(saved.tensors, in_one_go.tensors)
