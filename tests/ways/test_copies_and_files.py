"""Copies for EMA, and training that goes on from files."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import fastac
from tests import support
from tests.support import assert_same
from tests.ways.recipes import ATTENTION, WAN, Run, adamw, assert_exact_and_saved, batches, build, sampled

Trained = tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator]


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


def test_a_copy_outlives_its_model() -> None:
    """Policies per block stand by block: the copy's are those of its own blocks."""

    def recipe(run: Run) -> None:
        model, batch = build()
        run.enable(model, {"*blocks.0": "full", "*": "attn_only"})
        model = copy.deepcopy(model)
        optimizer = adamw(model)
        for one in batches(batch, 2):
            run.step(model, one, optimizer=optimizer)

    assert_exact_and_saved(recipe, saved_again=ATTENTION[WAN].in_blocks // 2)


def through_state_dicts(trained: Trained, fresh: Callable[[], Trained], folder: Path) -> Trained:
    model, optimizer, noise = trained
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "noise": noise.get_state(),
        "torch": torch.get_rng_state(),
    }
    torch.save(states, folder / "states.pt")
    loaded = torch.load(folder / "states.pt")
    model, optimizer, noise = fresh()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    noise.set_state(loaded["noise"])
    torch.set_rng_state(loaded["torch"])
    return model, optimizer, noise


def through_save_pretrained(trained: Trained, fresh: Callable[[], Trained], folder: Path) -> Trained:
    model, optimizer, noise = trained
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).train()
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()  # mapped from the file it lies unaligned, and sums round otherwise
    resumed = adamw(loaded)
    resumed.load_state_dict(optimizer.state_dict())
    return loaded, resumed, noise


def through_the_whole_model(trained: Trained, fresh: Callable[[], Trained], folder: Path) -> Trained:
    """Pickled as it is, enabled."""
    model, optimizer, noise = trained
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    resumed = adamw(loaded)
    resumed.load_state_dict(optimizer.state_dict())
    return loaded, resumed, noise


FILES: dict[str, Callable[[Trained, Callable[[], Trained], Path], Trained]] = {
    "state dicts": through_state_dicts,
    "save_pretrained": through_save_pretrained,
    "the whole model": through_the_whole_model,
}


@pytest.mark.parametrize("files", FILES)
def test_training_that_goes_on_from_files(files: str, tmp_path: Path) -> None:
    """Two steps, all of it to disk and back into a fresh model, two more: as four steps in one go.

    Adapters drop out, so that the generators' states count; what save_pretrained writes has no adapters.
    """

    def start(seed: int) -> tuple[Trained, Any]:
        model, batch = build(seed=seed)
        if files != "save_pretrained":
            model.requires_grad_(False)
            model.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
            support.fill_zeros(model)
        return (model, adamw(model), torch.Generator().manual_seed(seed)), batch

    def recipe(run: Run, stops: bool = True) -> None:
        trained, batch = start(seed=0)
        run.enable(trained[0])
        for number in range(4):
            if stops and number == 2:
                folder = tmp_path / str(run.policy)
                folder.mkdir()
                trained = FILES[files](trained, lambda: start(seed=8)[0], folder)
                if files == "the whole model":
                    assert fastac.report(trained[0]).active is (run.policy is not None)
                else:
                    run.enable(trained[0])
            model, optimizer, noise = trained
            (one,) = batches(batch, 1, noise)
            run.step(model, one, optimizer=optimizer)

    saved = assert_exact_and_saved(recipe)
    in_one_go = Run(None)
    recipe(in_one_go, stops=False)
    assert_same(saved.tensors, in_one_go.tensors)


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
            model.requires_grad_(False)
            model.add_adapter(peft.LoraConfig(r=4, target_modules="all-linear"))
            support.fill_zeros(model)
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
