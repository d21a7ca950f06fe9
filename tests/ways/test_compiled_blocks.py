"""diffusers' compile_repeated_blocks: the first step counts, with nothing compiled before."""

from __future__ import annotations

from pathlib import Path

import fastac
from tests import compiler
from tests.ways.recipes import ATTENTION, FEED_FORWARD, WAN, Run, adamw, adapt, assert_exact_and_saved, batches, build


def test_compile_repeated_blocks_before_enable(tmp_path: Path) -> None:
    """Trainings that are compiled alike. In the first step one compiled block of each class is run once more, eagerly.

    With an adapter, nothing before the first trains. After enable: tests/compile/test_compiled_models.py.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        adapt(model, FEED_FORWARD, dropout=0.0)
        model.compile_repeated_blocks(backend="aot_eager")
        run.enable(model)
        optimizer = adamw(model)
        with compiler.fresh(tmp_path):
            for one in batches(batch, 2):
                run.step(model, one, optimizer=optimizer)
        if run.policy == "attn_only":
            assert sum(row.saved for row in fastac.report(model).rows) == ATTENTION[WAN]

    assert_exact_and_saved(recipe, saved_again=[ATTENTION[WAN] // 2, 0], with_full=False)
