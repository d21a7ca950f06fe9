"""diffusers' compile_repeated_blocks, before and after enable: the first step counts, with nothing compiled before."""

from __future__ import annotations

import peft
import pytest
import torch

import fastac
from tests import support
from tests.compiler import fresh_compiler, kernel_folder, reset  # noqa: F401  (two fixtures)
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    EACH_COMPILED_MODEL,
    FEED_FORWARD,
    WAN,
    Run,
    adamw,
    assert_exact_and_saved,
    batches,
    build,
)


def compile_blocks(model: torch.nn.Module, backend: str) -> None:
    if type(model).__name__ == COGVIDEOX:  # diffusers does not say which of its blocks repeat
        for block in model.transformer_blocks:
            block.compile(backend=backend)
    else:
        model.compile_repeated_blocks(backend=backend)


def assert_compiled_training_is_exact(name: str, order: str, trained: str, backend: str) -> None:
    """Trainings that are compiled alike. In the first step one compiled block of each class is looked at again."""

    def recipe(run: Run) -> None:
        reset()
        model, batch = build(name)
        if trained == "adapter":
            model.requires_grad_(False)
            model.add_adapter(peft.LoraConfig(r=4, target_modules=FEED_FORWARD))
            support.fill_zeros(model)
        if order == "after":
            run.enable(model)
        compile_blocks(model, backend)
        if order == "before":
            run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 2):
            run.step(model, one, optimizer=optimizer)
        if run.policy == "attn_only":
            assert sum(row.saved for row in fastac.report(model).rows) == ATTENTION[name].in_blocks

    looks = ATTENTION[name].in_blocks // 2
    assert_exact_and_saved(recipe, name, saved_again=[looks, 0], with_full=name == COGVIDEOX)


@pytest.mark.parametrize(
    ("order", "trained"), [("before", "adapter"), pytest.param("after", "all", marks=pytest.mark.slow)]
)
@EACH_COMPILED_MODEL
def test_compile_repeated_blocks(name: str, order: str, trained: str) -> None:
    """order: of compile_repeated_blocks, against fastac.enable."""
    assert_compiled_training_is_exact(name, order, trained, "aot_eager")


@pytest.mark.slow
def test_inductor() -> None:
    """Nothing before the first adapter trains: inductor uses the buffer of the first attention's output again."""
    assert_compiled_training_is_exact(WAN, "before", "adapter", "inductor")
