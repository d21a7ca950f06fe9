"""Several forwards in one training: a model and its reference; a generator and a discriminator."""

from __future__ import annotations

from typing import Any

import peft
import torch

from tests import support
from tests.ways.recipes import ATTENTION, WAN, Run, adamw, assert_exact_and_saved, batches, build


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
