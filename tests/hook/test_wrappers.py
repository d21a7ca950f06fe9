"""Blocks inside torch's CheckpointWrapper, the third host: what else may be wrapped, and what is refused."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support
from tests.hook.hosts import diffuser, step_of, wrap_blocks
from tests.model_state import state_of
from tests.support import assert_same, stack_inputs, train_step


def test_several_containers(attention_executions: Counter[str]) -> None:
    model, batch = support.build("HunyuanVideoTransformer3DModel")
    expected = train_step(model, batch)
    executions = attention_executions.copy()
    kinds = {
        type(block) for name in ("transformer_blocks", "single_transformer_blocks") for block in getattr(model, name)
    }
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in kinds)
    fastac.enable(model)
    attention_executions.clear()
    found = train_step(model, batch)
    assert_same({name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}, expected)
    assert attention_executions == executions


def test_blocks_below_an_offloading_wrapper(attention_executions: Counter[str]) -> None:
    """save_on_cpu around all blocks, each of which is checkpointed inside it; and around each block alone."""
    model, inputs = torch.nn.Sequential(), stack_inputs()
    model.inner = offload_wrapper(support.stack())
    model.forward = lambda **inputs: model.inner(**inputs)
    expected = train_step(model, inputs)
    fastac.enable(model, blocks="inner.blocks")
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions.total() == 4
    offloaded = wrap_blocks(diffuser(), offload_wrapper)
    fastac.enable(offloaded)
    assert step_of(offloaded, attention_executions) == 4
    (row,) = fastac.report(offloaded).rows
    assert (row.block_class, row.blocks_seen, row.saved) == ("AttentionBlock", 2, 4)


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
