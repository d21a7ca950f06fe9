"""Models that are inside torch.compile's OptimizedModule or a PeftModel: enable takes those. DDP: tests/distributed.

What a wrapped training computes is compared with the same wrapped training without fastac.
"""

from __future__ import annotations

from collections.abc import Callable

import peft
import pytest
import torch

import fastac
from tests import support
from tests.compiler import reset
from tests.model_state import state_of
from tests.ways.recipes import ATTENTION, WAN, Run, adamw, assert_exact_and_saved, batches, build


def with_adapter(model: torch.nn.Module) -> torch.nn.Module:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
    support.fill_zeros(wrapped)
    return wrapped


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    reset()
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("wrap", [with_adapter, pytest.param(compiled, marks=pytest.mark.slow)])
def test_wrapped_models(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Two steps under fastac and one after `disable`, which takes the wrapper, too.

    Compiled, the saving is in the graph: exact from the first step on, and counted at the kernel.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        wrapped = wrap(model)
        inside = state_of(model)
        run.enable(wrapped)
        optimizer = adamw(wrapped)
        for number, one in enumerate(batches(batch, 3)):
            if number == 2:
                report = fastac.report(wrapped)
                assert (report.model_class, report.active) == (WAN, run.policy is not None)
                fastac.disable(wrapped)
                assert not fastac.report(wrapped).active
                assert state_of(model) == inside
            run.step(wrapped, one, optimizer=optimizer)

    blocks = ATTENTION[WAN]
    assert_exact_and_saved(recipe, again=[blocks, blocks, 0], with_full=wrap is not compiled)
