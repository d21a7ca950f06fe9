"""diffusers' compile_repeated_blocks, before and after enable: the first step counts, with nothing compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastac
from tests import compiler
from tests.ways.recipes import ATTENTION, FEED_FORWARD, WAN, Run, adamw, adapt, assert_exact_and_saved, batches, build


@pytest.mark.parametrize(
    ("order", "trained"), [("before", "adapter"), pytest.param("after", "all", marks=pytest.mark.slow)]
)
def test_compile_repeated_blocks(order: str, trained: str, tmp_path: Path) -> None:
    """Trainings that are compiled alike. In the first step one compiled block of each class is run once more, eagerly.

    order: of compile_repeated_blocks, against fastac.enable. trained: with an adapter, nothing before the first trains.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        if trained == "adapter":
            adapt(model, FEED_FORWARD, dropout=0.0)
        if order == "after":
            run.enable(model)
        model.compile_repeated_blocks(backend="aot_eager")
        if order == "before":
            run.enable(model)
        optimizer = adamw(model)
        with compiler.fresh(tmp_path):
            for one in batches(batch, 2):
                run.step(model, one, optimizer=optimizer)
        if run.policy == "attn_only":
            assert sum(row.saved for row in fastac.report(model).rows) == ATTENTION[WAN].in_blocks

    assert_exact_and_saved(recipe, saved_again=[ATTENTION[WAN].in_blocks // 2, 0], with_full=False)
