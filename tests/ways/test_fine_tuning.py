"""Full fine-tuning, LoRA, a frozen base, gradient accumulation, half precision: every number is as without fastac."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch

from tests import support
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    EACH_MODEL,
    FEED_FORWARD,
    HUNYUAN,
    LTX,
    WAN,
    Run,
    adamw,
    assert_exact_and_saved,
    batches,
    build,
    narrow,
    repeated,
)

TARGETS = {
    "attention": ["to_q", "to_k", "to_v", "to_out.0"],
    "feed-forward": FEED_FORWARD,
    "all-linear": "all-linear",
}


@EACH_MODEL
def test_full_fine_tuning(name: str) -> None:
    """Ten AdamW steps, in which a single differing bit would grow."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 10):
            run.step(model, one, optimizer=optimizer)

    assert_exact_and_saved(recipe, name)


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("through", ["add_adapter", "get_peft_model"])
@EACH_MODEL
def test_lora(name: str, through: str, target: str, dropout: float) -> None:
    """Adapters alone train, over inputs without gradient: attention of the first block has nothing before it to train.

    Their dropout draws numbers inside the recomputed part.
    """

    def recipe(run: Run) -> None:
        model, batch = build(name)
        model.requires_grad_(False)
        config = peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=dropout, target_modules=TARGETS[target])
        trained: Any = model
        if through == "add_adapter":
            model.add_adapter(config)
        else:
            trained = peft.get_peft_model(model, config)
        support.fill_zeros(model)  # the second factor, behind which the first has no gradient
        run.enable(model)
        optimizer = adamw(trained)
        for one in batches(batch, 3):
            run.step(trained, one, optimizer=optimizer)

    saved = assert_exact_and_saved(recipe, name)
    gradients = {key.partition("gradient of ")[2] for key in saved.tensors if "gradient of" in key}
    assert all("lora_" in key for key in gradients)


@pytest.mark.parametrize("through", ["add_adapter", "get_peft_model"])
@EACH_MODEL
def test_an_adapter_that_comes_after_enable(name: str, through: str) -> None:
    """The usual order in scripts is the other one, but nothing forbids this."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        model.requires_grad_(False)
        run.enable(model)
        config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=TARGETS["attention"])
        trained: Any = model
        if through == "add_adapter":
            model.add_adapter(config)
        else:
            trained = peft.get_peft_model(model, config)
        support.fill_zeros(model)
        optimizer = adamw(trained)
        for one in batches(batch, 3):
            run.step(trained, one, optimizer=optimizer)

    assert_exact_and_saved(recipe, name)


PARTS = {
    "attention": r"\.attn",
    "feed-forward": r"\.ff",
    "last blocks": r"blocks\.1\.",
    "output projection": r"^proj_out\.",
}
BEHIND_THE_FIRST_TRAINED = {WAN: 2, LTX: 2, HUNYUAN: 3, COGVIDEOX: 1}
"""Attention calls in the blocks that a gradient reaches when the last of each container is trained."""


@pytest.mark.parametrize("part", PARTS)
@EACH_MODEL
def test_a_frozen_base_with_a_trained_part(name: str, part: str) -> None:
    """Which parameters train decides what autograd keeps, and whether it guards the output of the first attention."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(PARTS[part], key) is not None)
        run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer)

    again = {"last blocks": BEHIND_THE_FIRST_TRAINED[name], "output projection": 0}
    assert_exact_and_saved(recipe, name, again=again.get(part, ATTENTION[name].in_blocks))


@pytest.mark.parametrize("shapes", ["equal", "unequal"])
@EACH_MODEL
def test_gradient_accumulation(name: str, shapes: str) -> None:
    """Micro-batches of aspect-ratio buckets: each shape has a census of its own; coming back to one is no surprise."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        run.enable(model)
        optimizer = adamw(model)
        for _ in range(2):
            first, second, third = batches(batch, 3)
            if shapes == "unequal":
                second, third = narrow(second), repeated(third, 2)
            run.step(model, first, second, third, optimizer=optimizer, backward=lambda loss: (loss / 3).backward())

    assert_exact_and_saved(recipe, name, forwards=3)


@pytest.mark.parametrize("way", ["autocast", "pure"])
@EACH_MODEL
def test_bf16(name: str, way: str) -> None:
    """Autocast: forward and recompute see the same casts, and attention is kept in bfloat16."""
    dtype = torch.float32 if way == "autocast" else torch.bfloat16

    def recipe(run: Run) -> None:
        model, batch = build(name, dtype)
        run.enable(model)
        optimizer = adamw(model)

        def forward(**inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                return model(**inputs)

        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer, forward=forward)

    assert_exact_and_saved(recipe, name)
