"""accelerate: `prepare` before or after `enable`, mixed precision, a model that it compiles."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

import fastac
from tests.compiler import reset
from tests.conftest import forget_accelerate
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    Run,
    adamw,
    assert_exact_and_saved,
    batches,
    build,
)


@pytest.mark.parametrize(
    ("mixed_precision", "order"),
    [("no", "before prepare"), ("bf16", "after prepare"), ("bf16", "after prepare, unwrapped")],
)
def test_prepare(mixed_precision: str, order: str) -> None:
    """prepare puts autocast around the model's forward. The recompute has the same."""

    def recipe(run: Run) -> None:
        forget_accelerate()
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
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
    """With a dynamo plugin `prepare` returns another module: a compiled model, or one of compiled blocks."""

    def recipe(run: Run) -> None:
        reset()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=compiled == "blocks")
        forget_accelerate()
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
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
