"""Blocks inside torch's CheckpointWrapper: taken over by fastac, never checkpointed twice, and given back."""

from __future__ import annotations

import copy
import functools
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import replay, scopes
from tests import support
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, stack, stack_inputs, train_step
from tests.ways.recipes import HUNYUAN, WAN, build

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


def alone(block: torch.nn.Module) -> torch.nn.Module:
    """As accelerate's FSDP2 plugin wraps with `activation_checkpointing`."""
    return checkpoint_wrapper(block, preserve_rng_state=False)


def offloaded(block: torch.nn.Module) -> torch.nn.Module:
    """The same with `activation_checkpointing_offload`."""
    return offload_wrapper(alone(block))


def wrap_blocks(model: Any, wrap: Wrap = alone, names: tuple[str, ...] = ("blocks",)) -> None:
    for name in names:
        blocks = model.get_submodule(name)
        for i, block in enumerate(blocks):
            blocks[i] = wrap(block)


def steps(model: torch.nn.Module, batch: dict[str, Any], executions: Counter[str]) -> tuple[dict[str, Any], list[int]]:
    """Two steps: what they computed, and the attention kernels of each."""
    found, counts = {}, []
    for number in range(2):
        executions.clear()
        found.update({f"{number} {name}": tensor for name, tensor in train_step(model, batch).items()})
        counts.append(executions[CPU_ATTENTION])
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in found.items()}, counts


@pytest.mark.parametrize("policy", ["attn_only", {"blocks.0": "attn_only", "*": "attn_only"}])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("wrap", [alone, offloaded], ids=lambda wrap: wrap.__name__)
def test_a_models_blocks(wrap: Wrap, order: str, policy: Any, attention_executions: Counter[str]) -> None:
    """Enabled before or after they are wrapped; attention runs once, and state-dict keys stay."""
    model, batch = build(WAN)
    expected, counts = steps(model, batch, attention_executions)
    assert counts == [4, 4]
    keys = list(model.state_dict())
    if order == "before":
        fastac.enable(model, policy)
    wrap_blocks(model, wrap)
    if order == "after":
        fastac.enable(model, policy)
    found, counts = steps(model, batch, attention_executions)
    assert counts == [4, 4]
    assert_same(found, expected)
    assert list(model.state_dict()) == keys
    (row,) = fastac.report(model).rows
    assert (row.block_class, row.blocks, row.blocks_seen, row.saved) == ("WanTransformerBlock", 2, 2, 4)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("wrap", [alone, offloaded], ids=lambda wrap: wrap.__name__)
def test_blocks_that_are_named(wrap: Wrap, order: str, attention_executions: Counter[str]) -> None:
    model, inputs = stack(), stack_inputs()
    expected, counts = steps(model, inputs, attention_executions)
    if order == "before":
        fastac.enable(model, blocks="blocks")
    wrap_blocks(model, wrap)
    if order == "after":
        fastac.enable(model, blocks="blocks")
    found, again = steps(model, inputs, attention_executions)
    assert again == counts
    assert_same(found, expected)
    (row,) = fastac.report(model).rows
    assert (row.block_class, row.blocks_seen, row.saved) == ("AttentionBlock", 2, 4)


@pytest.mark.parametrize("order", ["before", "after"])
def test_disable_gives_the_wrappers_back(order: str, attention_executions: Counter[str]) -> None:
    model, batch = build(WAN)
    if order == "before":
        fastac.enable(model)
    wrap_blocks(model)
    wrappers = list(model.blocks)
    before = [wrapper.checkpoint_fn for wrapper in wrappers]
    if order == "after":
        fastac.enable(model)
    assert steps(model, batch, attention_executions)[1] == [4, 4]
    fastac.disable(model)
    assert [wrapper.checkpoint_fn for wrapper in wrappers] == before
    assert steps(model, batch, attention_executions)[1] == [8, 8], "the wrapper checkpoints fully again"
    fastac.enable(model, "full")
    assert steps(model, batch, attention_executions)[1] == [8, 8], "once, not twice"


def test_named_blocks_are_given_back(attention_executions: Counter[str]) -> None:
    model, inputs = stack(), stack_inputs()
    wrap_blocks(model)
    before = [wrapper.checkpoint_fn for wrapper in model.blocks]
    fastac.enable(model, blocks="blocks")
    fastac.disable(model)
    assert [wrapper.checkpoint_fn for wrapper in model.blocks] == before
    assert steps(model, inputs, attention_executions)[1] == [8, 8]


def test_several_containers(attention_executions: Counter[str]) -> None:
    model, batch = build(HUNYUAN)
    plain = steps(model, batch, attention_executions)
    kinds = {
        type(block) for name in ("transformer_blocks", "single_transformer_blocks") for block in getattr(model, name)
    }
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in kinds)
    fastac.enable(model)
    found, counts = steps(model, batch, attention_executions)
    assert counts == plain[1]
    assert_same(found, plain[0])


def test_verify_leaves_them_as_they_were(attention_executions: Counter[str]) -> None:
    model, batch = build(WAN)
    wrap_blocks(model)
    before = [wrapper.checkpoint_fn for wrapper in model.blocks]
    found = fastac.verify(model, **batch)
    assert found.policy_executions == (4, 0)
    assert [wrapper.checkpoint_fn for wrapper in model.blocks] == before
    fastac.enable(model)
    ours = [wrapper.checkpoint_fn for wrapper in model.blocks]
    fastac.verify(model, **batch)
    assert [wrapper.checkpoint_fn for wrapper in model.blocks] == ours


# What is refused


@pytest.mark.parametrize("where", ["blocks.1.attn1", "patch_embedding"])
def test_wrapped_parts_are_refused_at_enable(where: str) -> None:
    model, _ = build(WAN)
    model.set_submodule(where, alone(model.get_submodule(where)))
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=rf"{WAN}\.{where} is wrapped in torch's CheckpointWrapper"):
        fastac.enable(model)
    assert state_of(model) == before


@pytest.mark.parametrize("policy", ["attn_only", {"blocks.0": "attn_only", "*": "attn_only"}])
def test_wrapped_parts_are_refused_at_the_first_forward(policy: Any) -> None:
    model, batch = build(WAN)
    fastac.enable(model, policy)
    for block in model.blocks:
        block.attn1 = alone(block.attn1)
    with pytest.raises(fastac.FastacError, match="attn1 is wrapped in torch's CheckpointWrapper"):
        model(**batch)


def mine(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


OTHERS = {
    "reentrant": lambda block: checkpoint_wrapper(block, CheckpointImpl.REENTRANT),
    "debug": lambda block: checkpoint_wrapper(block, debug=True),
    "own function": lambda block: checkpoint_wrapper(block, checkpoint_fn=mine),
    "context_fn": lambda block: checkpoint_wrapper(block, context_fn=functools.partial(torch_checkpoint)),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_ways_to_checkpoint_are_refused(other: str, order: str) -> None:
    model, batch = build(WAN)
    if order == "before":
        fastac.enable(model)
    wrap_blocks(model, OTHERS[other])
    before = state_of(model)
    match = r"blocks\.0 is wrapped in a CheckpointWrapper that does not checkpoint as torch does by default"
    if order == "after":
        with pytest.raises(fastac.FastacError, match=match):
            fastac.enable(model)
        assert state_of(model) == before
    else:
        with pytest.raises(fastac.FastacError, match=match):
            support.loss_of(model(**batch)).backward()


# Ways they are used


def copied(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model)


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("again", [copied, saved_and_loaded], ids=lambda again: again.__name__)
def test_a_copy_trains_and_is_given_its_own_back(again: Any, attention_executions: Counter[str]) -> None:
    model, batch = build(WAN)
    wrap_blocks(model)
    fastac.enable(model)
    expected, _ = steps(model, batch, attention_executions)
    other = again(model)
    found, counts = steps(other, batch, attention_executions)
    assert counts == [4, 4]
    assert_same(found, expected)
    fastac.disable(other)
    assert all(wrapper.checkpoint_fn.func is torch_checkpoint for wrapper in other.blocks)
    assert steps(other, batch, attention_executions)[1] == [8, 8]
    assert steps(model, batch, attention_executions)[1] == [4, 4]


def test_blocks_below_an_offloading_wrapper(attention_executions: Counter[str]) -> None:
    """save_on_cpu around all blocks, each of which is checkpointed inside it."""
    model, inputs = torch.nn.Sequential(), stack_inputs()
    model.inner = offload_wrapper(stack())
    model.forward = lambda **inputs: model.inner(**inputs)
    expected, counts = steps(model, inputs, attention_executions)
    fastac.enable(model, blocks="inner.blocks")
    found, again = steps(model, inputs, attention_executions)
    assert again == counts
    assert_same(found, expected)
    assert fastac.report(model).rows[0].saved == 4


def test_a_model_that_is_compiled_as_a_whole(attention_executions: Counter[str]) -> None:
    torch._dynamo.reset()
    model, batch = build(WAN)
    wrap_blocks(model)
    fastac.enable(model)
    torch.compile(model, backend="aot_eager")(**batch)[0].sum().backward()
    (row,) = fastac.report(model).rows
    assert (row.blocks_seen, row.blocks_compiled, row.saved) == (2, 2, 4)


def test_offloading_wrappers_alone_are_reported(attention_executions: Counter[str]) -> None:
    model, batch = build(WAN)
    wrap_blocks(model, offload_wrapper)
    fastac.enable(model)
    steps(model, batch, attention_executions)
    (row,) = fastac.report(model).rows
    assert (row.block_class, row.blocks_seen, row.saved) == ("WanTransformerBlock", 2, 4)


def test_a_call_of_checkpoint_leaves_its_wrapper_as_it_was(attention_executions: Counter[str]) -> None:
    block, inputs = alone(stack().blocks[0]), stack_inputs()
    before = block.checkpoint_fn
    attention_executions.clear()
    fastac.checkpoint(block, *inputs.values()).sum().backward()
    assert attention_executions[CPU_ATTENTION] == 2
    assert block.checkpoint_fn is before


def test_options_of_a_wrapper_that_hold_for_ours() -> None:
    """Its determinism check is off: a recompute that saves other shapes is the user's own business."""
    model, inputs = stack(), stack_inputs()
    calls = []

    class Odd(torch.nn.Module):
        def forward(self, video: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return video * torch.ones(1 if len(calls) % 2 else 16)

    for block in model.blocks:
        block.norms[2] = torch.nn.Sequential(Odd(), block.norms[2])
    wrap_blocks(model, functools.partial(checkpoint_wrapper, determinism_check="none"))
    fastac.enable(model, blocks="blocks")
    fastac.disable(model)
    fastac.checkpoint(model.blocks[0], *inputs.values()).sum().backward()
    assert len(calls) == 2


def test_verify_compares_with_no_checkpointing(
    monkeypatch: pytest.MonkeyPatch, attention_executions: Counter[str]
) -> None:
    """The wrappers' own checkpoint is no part of the reference: it would hide attention that runs again."""
    model, batch = build(WAN)
    wrap_blocks(model)
    assert fastac.verify(model, **batch).reference_executions == (4, 0)
    assert fastac.verify(model, **batch, reference="full").reference_executions == (4, 4)

    def runs_again(self: Any, entry: Any, resolved: Any, args: Any, kwargs: Any) -> Any:
        self.position += 1
        for counter in scopes.execution_counters:
            counter[resolved.name] += 1
        return entry.kept

    monkeypatch.setattr(replay.Replay, "_replay", runs_again)
    with pytest.raises(fastac.PolicyNotAppliedError, match="ran 4 attention kernels in backward"):
        fastac.verify(model, **batch)
    with pytest.raises(fastac.PolicyNotAppliedError, match="ran 2 attention kernels in backward"):
        fastac.verify(alone(stack().blocks[0]), **stack_inputs())
