"""Training a model, or two in turns: every number is as without fastac, bit for bit.

Full fine-tuning, LoRA, a frozen base, gradient accumulation, half precision, a base in float8, samples in between, and
a policy that changes.
"""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch

import fastac
from tests import support
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    FEED_FORWARD,
    WAN,
    Run,
    adamw,
    adapt,
    assert_exact_and_saved,
    batches,
    build,
    narrow,
    sampled,
)

PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]
"""Those of attention, to which diffusers' scripts add LoRA."""


@pytest.mark.parametrize("name", [WAN, COGVIDEOX])
def test_full_fine_tuning(name: str) -> None:
    """Ten AdamW steps, in which one wrong bit would grow. Text in cross-attention, and in the sequence."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        run.enable(model)
        run.train(model, batch, 10)

    assert_exact_and_saved(recipe, name)


@pytest.mark.parametrize(
    ("targets", "dropout", "order"),
    [(PROJECTIONS, 0.3, "before"), (FEED_FORWARD, 0.0, "before"), ("all-linear", 0.3, "after")],
    ids=["attention", "feed-forward", "all-linear"],
)
def test_lora(targets: Any, dropout: float, order: str) -> None:
    """Adapters alone train, and inputs have no gradient: nothing before the first attention trains.

    Their dropout draws numbers in what is recomputed. order: whether they come before fastac.enable, or after.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        model.requires_grad_(False)
        if order == "after":
            run.enable(model)
        config = peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=dropout, target_modules=targets)
        trained = peft.get_peft_model(model, config)
        support.fill_zeros(model)  # the second factor, behind which the first has no gradient
        if order == "before":
            run.enable(model)
        run.train(trained, batch)

    saved = assert_exact_and_saved(recipe)
    gradients = {key.partition("gradient of ")[2] for key in saved.tensors if "gradient of" in key}
    assert all("lora_" in key for key in gradients)


PARTS = {
    "attention": (r"\.attn", 4),
    "feed-forward": (r"\.ff", 4),
    "last block": (r"blocks\.1\.", 2),
    "output projection": (r"^proj_out\.", 0),
}
"""Trained parameters, and how many attention calls are in the blocks that a gradient reaches then."""


@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_base_with_a_trained_part(part: str) -> None:
    """It decides what autograd keeps, and whether it guards the output of the first attention."""
    pattern, again = PARTS[part]

    def recipe(run: Run) -> None:
        model, batch = build()
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(pattern, key) is not None)
        run.enable(model)
        run.train(model, batch)

    assert_exact_and_saved(recipe, again=again)


def test_gradient_accumulation() -> None:
    """Micro-batches of aspect-ratio buckets: regions of each shape are a kind of their own."""

    def recipe(run: Run) -> None:
        model, batch = build()
        run.enable(model)
        optimizer = adamw(model)
        for _ in range(2):
            first, second = batches(batch, 2)
            run.step(model, first, narrow(second), optimizer=optimizer, backward=lambda loss: (loss / 2).backward())

    assert_exact_and_saved(recipe, forwards=2)


@pytest.mark.parametrize(("order", "adapter"), [("before", "first"), ("after", "last")])
def test_layerwise_casting(order: str, adapter: str) -> None:
    """Each layer of the frozen base is cast to bfloat16 for its own forward.

    order: whether enable_layerwise_casting comes before or after fastac.enable. adapter: before both, or after.
    """

    def recipe(run: Run) -> None:
        model, batch = build(dtype=torch.bfloat16)
        if adapter == "first":
            # diffusers then switches off that peft casts its inputs
            adapt(model, PROJECTIONS, dtype=torch.bfloat16)
        if order == "after":
            run.enable(model)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        if order == "before":
            run.enable(model)
        if adapter == "last":
            adapt(model, PROJECTIONS)
        stored = {key for key, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn}
        assert any("to_k.base_layer.weight" in key for key in stored)
        run.train(model, batch)

    assert_exact_and_saved(recipe)


@pytest.mark.parametrize(
    ("mode", "training"), [(torch.no_grad, False), (torch.inference_mode, True)], ids=["no_grad", "inference_mode"]
)
def test_sampling_between_steps(mode: Any, training: bool) -> None:
    """A sample runs every attention once, as without fastac, and does not change the next step."""

    def recipe(run: Run) -> None:
        model, batch = build()
        adapt(model)  # with dropout
        run.enable(model)
        optimizer = adamw(model)
        for number, one in enumerate(batches(batch, 3)):
            model.train(training)
            run.keep(f"sample {number}", {"before": sampled(model, one, mode)})
            model.train()
            run.step(model, one, optimizer=optimizer)
            model.train(training)
            run.keep(f"sample {number}", {"after": sampled(model, one, mode)})

    assert_exact_and_saved(recipe)


@pytest.mark.parametrize("disables", [False, True])
def test_a_policy_counts_from_the_next_forward_on(disables: bool) -> None:
    """Switched, or disabled, between forward and backward: the step goes on as its forward began."""
    other = {"attn_only": "full", "full": "attn_only"}

    def recipe(run: Run) -> None:
        model, batch = build()
        run.enable(model)

        def switch_and_backward(loss: torch.Tensor) -> None:
            if disables:
                fastac.disable(model)
            elif run.policy is not None:
                run.enable(model, other[run.policy])
            loss.backward()

        run.train(model, batch, 2, backward=switch_and_backward)

    calls = ATTENTION[WAN]
    assert_exact_and_saved(recipe, again=[calls, 0], saved_again=[0, 0 if disables else calls])


# Several forwards in one step


def test_a_reference_without_gradients() -> None:
    """Preference training: the model without its adapter runs between its forward and its backward."""

    def recipe(run: Run) -> None:
        model, batch = build()
        trained = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
        support.fill_zeros(trained)
        run.enable(trained)

        def forward(**inputs: Any) -> torch.Tensor:
            (output,) = trained(**inputs)
            with torch.no_grad(), trained.disable_adapter():
                (target,) = trained(**inputs)
            return (output - target).square()

        run.train(trained, batch, forward=forward)

    assert_exact_and_saved(recipe, forwards=2, again=ATTENTION[WAN])


def test_generator_and_discriminator() -> None:
    """They take turns. The generator's gradient comes through the discriminator, which is under "full"."""

    def recipe(run: Run) -> None:
        generator, batch = build()
        discriminator, _ = build(seed=5)
        run.enable(generator)
        run.enable(discriminator, "full")
        optimizer, opponent = adamw(generator), adamw(discriminator)

        def generated(**inputs: Any) -> Any:
            discriminator.requires_grad_(False)
            (fake,) = generator(**inputs)
            return discriminator(**inputs | {"hidden_states": fake})

        def judged(**inputs: Any) -> Any:
            discriminator.requires_grad_(True)
            with torch.no_grad():
                (fake,) = generator(**inputs)
            (judgement,) = discriminator(**inputs | {"hidden_states": fake})
            return judgement.square()

        for one in batches(batch, 2):
            run.step(generator, one, optimizer=optimizer, forward=generated)
            run.step(discriminator, one, optimizer=opponent, forward=judged)

    blocks = ATTENTION[WAN]
    assert_exact_and_saved(recipe, forwards=2, again=[2 * blocks, blocks] * 2, saved_again=[blocks] * 4)
