"""Full fine-tuning, LoRA, a frozen base, gradient accumulation, half precision: every number is as without fastac."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch

from fastac.models.published import LORA_TARGETS
from tests import support
from tests.ways.recipes import (
    COGVIDEOX,
    FEED_FORWARD,
    WAN,
    Run,
    adamw,
    assert_exact_and_saved,
    batches,
    build,
    narrow,
    repeated,
)


@pytest.mark.parametrize("name", [WAN, COGVIDEOX])
def test_full_fine_tuning(name: str) -> None:
    """Ten AdamW steps, in which a single differing bit would grow; text in cross-attention, and in the sequence."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 10):
            run.step(model, one, optimizer=optimizer)

    assert_exact_and_saved(recipe, name)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("through", "targets", "dropout"),
    [
        ("add_adapter", list(LORA_TARGETS), 0.3),
        ("get_peft_model", FEED_FORWARD, 0.0),
        ("get_peft_model", "all-linear", 0.3),
    ],
    ids=["attention", "feed-forward", "all-linear"],
)
def test_lora(through: str, targets: Any, dropout: float, order: str) -> None:
    """Adapters alone train, over inputs without gradient: attention of the first block has nothing before it to train.

    Their dropout draws numbers inside the recomputed part. order: of the adapter, against fastac.enable.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        model.requires_grad_(False)
        if order == "after":
            run.enable(model)
        config = peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=dropout, target_modules=targets)
        trained: Any = model
        if through == "add_adapter":
            model.add_adapter(config)
        else:
            trained = peft.get_peft_model(model, config)
        support.fill_zeros(model)  # the second factor, behind which the first has no gradient
        if order == "before":
            run.enable(model)
        optimizer = adamw(trained)
        for one in batches(batch, 3):
            run.step(trained, one, optimizer=optimizer)

    saved = assert_exact_and_saved(recipe)
    gradients = {key.partition("gradient of ")[2] for key in saved.tensors if "gradient of" in key}
    assert all("lora_" in key for key in gradients)


PARTS = {
    "attention": (r"\.attn", 4),
    "feed-forward": (r"\.ff", 4),
    "last block": (r"blocks\.1\.", 2),
    "output projection": (r"^proj_out\.", 0),
}
"""Patterns of parameters, and the attention calls in the blocks that a gradient reaches when these are trained."""


@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_base_with_a_trained_part(part: str) -> None:
    """Which parameters train decides what autograd keeps, and whether it guards the output of the first attention."""
    pattern, again = PARTS[part]

    def recipe(run: Run) -> None:
        model, batch = build()
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(pattern, key) is not None)
        run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer)

    assert_exact_and_saved(recipe, again=again)


def test_gradient_accumulation() -> None:
    """Micro-batches of aspect-ratio buckets: each shape has a census of its own; coming back to one is no surprise."""

    def recipe(run: Run) -> None:
        model, batch = build()
        run.enable(model)
        optimizer = adamw(model)
        for _ in range(2):
            first, second, third = batches(batch, 3)
            micro = first, narrow(second), repeated(third, 2)
            run.step(model, *micro, optimizer=optimizer, backward=lambda loss: (loss / 3).backward())

    assert_exact_and_saved(recipe, forwards=3)


@pytest.mark.parametrize("way", ["autocast", "pure"])
def test_bf16(way: str) -> None:
    """Autocast: forward and recompute see the same casts, and attention is kept in bfloat16."""
    dtype = torch.float32 if way == "autocast" else torch.bfloat16

    def recipe(run: Run) -> None:
        model, batch = build(dtype=dtype)
        run.enable(model)
        optimizer = adamw(model)

        def forward(**inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                return model(**inputs)

        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer, forward=forward)

    assert_exact_and_saved(recipe)
