"""accelerate's regional compilation. `prepare` in either order, and its engines: tests/distributed."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

import fastac
from tests.compiler import reset
from tests.conftest import forget_accelerate
from tests.ways.recipes import ATTENTION, COGVIDEOX, Run, adamw, assert_exact_and_saved, batches, build


@pytest.mark.slow
def test_prepare_that_compiles_blocks() -> None:
    """It returns another model, of compiled blocks, after `enable`."""

    def recipe(run: Run) -> None:
        reset()
        forget_accelerate()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        model, batch = build(COGVIDEOX)
        run.enable(model)
        prepared, optimizer = accelerator.prepare(model, adamw(model))
        assert prepared is not model
        for one in batches(batch, 2):
            run.step(prepared, one, optimizer=optimizer, backward=accelerator.backward)
        assert fastac.report(prepared).active == (run.policy is not None)

    assert_exact_and_saved(recipe, COGVIDEOX, saved_again=[ATTENTION[COGVIDEOX] // 2, 0], with_full=False)
