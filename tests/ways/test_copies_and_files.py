"""Copies for EMA, and the files that an enabled model writes. Pickles: tests/hook; resumed training: accelerate."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from tests.ways.recipes import Run, adamw, adapt, assert_exact_and_saved, batches, build, sampled


def test_ema_by_deepcopy() -> None:
    """The average follows and samples, then trains on by itself when fastac is disabled for the other."""

    def recipe(run: Run) -> None:
        model, batch = build()
        run.enable(model)
        average = copy.deepcopy(model).eval()
        optimizer = adamw(model)
        for number, one in enumerate(batches(batch, 2)):
            run.step(model, one, optimizer=optimizer)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
            run.keep(f"average {number}", {"sample": sampled(average, one)})
        fastac.disable(model)
        if run.policy is not None:
            assert fastac.report(average).active
            assert not fastac.report(model).active
        optimizer = adamw(average.train())
        for one in batches(batch, 2):
            run.step(average, one, optimizer=optimizer)

    assert_exact_and_saved(recipe)


def content_of(file: Path) -> tuple[Any, bytes]:
    """The header of a file, and its tensors. The order in a header of safetensors is left to chance."""
    content = file.read_bytes()
    if file.suffix != ".safetensors":
        return json.loads(content), b""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


@pytest.mark.parametrize("adapters", [False, True], ids=["model", "adapters"])
def test_files_are_those_of_a_model_without_fastac(adapters: bool, tmp_path: Path) -> None:
    """Weights, config and adapters that an enabled model writes."""

    def recipe(run: Run) -> None:
        model, batch = build()
        if adapters:
            adapt(model, "all-linear", dropout=0.0)
        run.enable(model)
        run.step(model, batch, optimizer=adamw(model))
        save = model.save_lora_adapter if adapters else model.save_pretrained
        save(tmp_path / str(run.policy))

    assert_exact_and_saved(recipe)
    plain, saved, full = (
        {file.name: content_of(file) for file in (tmp_path / policy).iterdir()}
        for policy in ("None", "attn_only", "full")
    )
    assert any(len(weights) > 1_000 for _, weights in plain.values())
    assert saved == plain
    assert full == plain
