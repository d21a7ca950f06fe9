"""Several models in one training, of one class and one input signature, under policies of their own."""

from __future__ import annotations

from typing import Any

import peft
import torch

from tests import support
from tests.ways.recipes import ATTENTION, WAN, Run, adamw, adapt, assert_exact_and_saved, batches, build


def test_a_student_and_its_teacher() -> None:
    """The teacher is enabled under another policy, and only looks on: it makes N calls more, and never any again."""

    def recipe(run: Run) -> None:
        student, batch = build()
        teacher, _ = build(seed=5)
        run.enable(student)
        run.enable(teacher, "full")
        optimizer = adamw(student)

        def forward(**inputs: Any) -> torch.Tensor:
            with torch.no_grad():
                (target,) = teacher(**inputs)
            (output,) = student(**inputs)
            return (output - target).square()

        for one in batches(batch, 3):
            run.step(student, one, optimizer=optimizer, forward=forward)

    assert_exact_and_saved(recipe, forwards=2, again=ATTENTION[WAN])


def test_generator_and_discriminator() -> None:
    """They take turns; the generator's gradient comes through the discriminator, which recomputes its attention."""

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


def test_two_adapters_of_one_model() -> None:
    """As in distribution matching: each step trains one of them, over the same frozen base."""

    def recipe(run: Run) -> None:
        model, batch = build()
        for adapter in ("generator", "critic"):
            adapt(model, name=adapter)
        run.enable(model)
        optimizers = {}
        for adapter in ("generator", "critic"):
            model.set_adapter(adapter)
            optimizers[adapter] = adamw(model)
        for number, one in enumerate(batches(batch, 4)):
            adapter = ("generator", "critic")[number % 2]
            model.set_adapter(adapter)
            run.step(model, one, optimizer=optimizers[adapter])

    saved = assert_exact_and_saved(recipe)
    for number, adapter in enumerate(("generator", "critic") * 2):
        trained = [key for key in saved.tensors if key.startswith(f"step {number}: gradient of")]
        assert trained
        assert all(adapter in key for key in trained)


def test_a_reference_that_is_the_model_without_its_adapter() -> None:
    """As in preference training: the adapter is switched off for a moment, between the forward and its backward."""

    def recipe(run: Run) -> None:
        model, batch = build()
        trained = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
        support.fill_zeros(trained)
        run.enable(trained)
        optimizer = adamw(trained)

        def forward(**inputs: Any) -> torch.Tensor:
            (output,) = trained(**inputs)
            with torch.no_grad(), trained.disable_adapter():
                (reference,) = trained(**inputs)
            return (output - reference).square()

        for one in batches(batch, 3):
            run.step(trained, one, optimizer=optimizer, forward=forward)

    assert_exact_and_saved(recipe, forwards=2, again=ATTENTION[WAN])
