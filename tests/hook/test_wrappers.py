"""Blocks inside torch's CheckpointWrapper, the third host: other wrapped models, and refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support
from tests.hook.hosts import diffuser, wrap_blocks
from tests.model_state import state_of
from tests.support import executions_of, stack_inputs, train_step


def test_blocks_below_an_offloading_wrapper() -> None:
    """save_on_cpu around all blocks."""
    model, inputs = torch.nn.Sequential(), stack_inputs()
    model.inner = offload_wrapper(support.stack())
    model.forward = lambda **inputs: model.inner(**inputs)
    expected = train_step(model, inputs)
    fastac.enable(model, blocks="inner.blocks")
    assert executions_of(model, inputs, expected) == 4


def mine(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


OTHERS = {
    "reentrant": lambda block: checkpoint_wrapper(block, CheckpointImpl.REENTRANT),
    "debug": lambda block: checkpoint_wrapper(block, debug=True),
    "own function": lambda block: checkpoint_wrapper(block, checkpoint_fn=mine),
    "context_fn": lambda block: checkpoint_wrapper(block, context_fn=functools.partial(torch_checkpoint)),
}


@pytest.mark.parametrize("enabled_first", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_other_ways_to_checkpoint_are_refused(other: str, enabled_first: bool) -> None:
    model = diffuser()
    if enabled_first:
        fastac.enable(model)
    wrap_blocks(model, OTHERS[other])
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"CheckpointWrapper"):
        train_step(model, stack_inputs()) if enabled_first else fastac.enable(model)
    assert enabled_first or state_of(model) == before
