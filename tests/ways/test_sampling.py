"""Samples between training steps, and gradients in eval mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ways.recipes import Batch, Run, adamw, adapt, assert_exact_and_saved, batches, build, sampled


def adapted() -> tuple[torch.nn.Module, Batch]:
    """A model whose adapters drop out, so that it matters whether it is in eval mode."""
    model, batch = build()
    adapt(model)
    return model, batch


@pytest.mark.parametrize(
    ("mode", "training"), [(torch.no_grad, False), (torch.inference_mode, True)], ids=["no_grad", "inference_mode"]
)
def test_sampling_between_steps(mode: Any, training: bool) -> None:
    """A sample runs every attention once, as the plain model does, and leaves the next step as it was."""

    def recipe(run: Run) -> None:
        model, batch = adapted()
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


def test_gradients_in_eval_mode() -> None:
    """A frozen dropout, or guidance by the gradient of the input: diffusers checkpoints in eval mode, too."""

    def recipe(run: Run) -> None:
        model, batch = adapted()
        run.enable(model)
        optimizer = adamw(model)
        for number, one in enumerate(batches(batch, 4)):
            model.train(number % 2 == 1)
            one["hidden_states"].requires_grad_()
            run.step(model, one, optimizer=optimizer)
            run.keep(f"guidance {number}", {"gradient": one["hidden_states"].grad})

    assert_exact_and_saved(recipe)
