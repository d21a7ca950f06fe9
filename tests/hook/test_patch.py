"""patch_checkpoint: calls of torch's checkpoint by its name are calls of fastac's. A name captured before: an error."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import FastacError, PolicyNotAppliedError
from tests import support
from tests.hook.hosts import caller
from tests.hook.test_no_region import LibrariesCheckpoint
from tests.support import AttentionBlock, executions_of, stack_inputs, train_step

CAPTURED = functools.partial(torch_checkpoint, use_reentrant=False)


def by_name(*args: Any) -> torch.Tensor:
    return checkpoint(*args, use_reentrant=False)


def by_attribute(*args: Any) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)


@pytest.mark.parametrize("call", [by_name, by_attribute, lambda *args: torch.utils.checkpoint.checkpoint(*args)])
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter")
def test_names(call: Callable[..., torch.Tensor], attention_executions: Counter[str]) -> None:
    """Attention runs once inside, and twice outside. A backward may come after the end.

    Without options torch itself runs it reentrant, with a warning.
    """
    model, inputs = caller(call), stack_inputs()
    expected = train_step(model, inputs)
    with fastac.patch_checkpoint():
        for _ in range(2):
            assert executions_of(model, inputs, expected) == 4
        attention_executions.clear()
        output = model(**inputs)
    output.sum().backward()
    assert attention_executions == {support.CPU_ATTENTION: 4}
    assert executions_of(model, inputs, expected) == 8


def test_what_took_the_name_meanwhile() -> None:
    """It is torch's function again when the patch ends. `enable` takes a CheckpointWrapper made meanwhile."""
    with fastac.patch_checkpoint():
        model = caller(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
        wrapped = caller(lambda block, *args: block(*args))
        wrapped.blocks = torch.nn.ModuleList(map(checkpoint_wrapper, wrapped.blocks))
        fastac.enable(wrapped, blocks="blocks")
        assert executions_of(wrapped, stack_inputs()) == executions_of(model, stack_inputs()) == 4
    assert executions_of(model, stack_inputs()) == 8


def test_functions_that_run_blocks_of_several_classes() -> None:
    """Each class is judged, although one function makes the calls, as trainers' create_custom_forward does."""

    def run(block: torch.nn.Module) -> Callable[..., torch.Tensor]:
        return lambda *args: block(*args)

    class Other(AttentionBlock):
        pass

    with fastac.patch_checkpoint():
        partial = functools.partial
        for make in (run, lambda block: run(block.forward), lambda block: partial(AttentionBlock.forward, block)):
            by_attribute(make(AttentionBlock()), *stack_inputs().values())
            with pytest.raises(PolicyNotAppliedError, match="small ops"):
                by_attribute(make(Other(attend=support.written_out)), *stack_inputs().values())


def test_names_that_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is imported while patched gets the patched name, and torch's when the patch ends."""
    late = types.ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", late)
    with fastac.patch_checkpoint():
        exec("from torch.utils.checkpoint import checkpoint as own", vars(late))
        assert late.own is checkpoint is torch.utils.checkpoint.checkpoint is not CAPTURED.func
    assert late.own is checkpoint is torch.utils.checkpoint.checkpoint is CAPTURED.func


@pytest.mark.parametrize(
    ("call", "compiled"),
    [
        (CAPTURED, False),
        (CAPTURED, True),
        (LibrariesCheckpoint.apply, False),
        (LibrariesCheckpoint.apply, True),
        (lambda *args: torch.utils.checkpoint.CheckpointFunction.apply(*args[:1], True, *args[1:]), False),
        (lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True), False),
    ],
    ids=["captured", "captured, compiled", "library", "library, compiled", "torch", "reentrant"],
)
def test_checkpoints_that_stay_torch_s(call: Any, compiled: bool) -> None:
    """Captured before the patch, reentrant, or a library's: an error that says what to switch."""
    model, inputs = caller(call), stack_inputs()
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with fastac.patch_checkpoint():
        for _ in range(2):
            with pytest.raises(FastacError, match=r"use_reentrant=False"):
                train_step(run, inputs)
    train_step(model, inputs)


def test_a_kernel_that_came_in_since() -> None:
    """The patch intercepts it, although no region ever opens."""
    model = caller(CAPTURED)
    model.blocks[0].attend = support.custom_attention("came_in")
    with fastac.patch_checkpoint(), pytest.raises(FastacError, match="came_in"):
        train_step(model, stack_inputs())


def test_attention_without_any_checkpoint_is_left_alone() -> None:
    """That of an encoder beside the model."""
    with fastac.patch_checkpoint():
        assert executions_of(caller(lambda block, *args: block(*args)), stack_inputs()) == 4


def test_what_the_policy_recomputes_may_be_captured() -> None:
    with fastac.patch_checkpoint(fastac.Policy("attn_only", min_kv=1000)):
        assert executions_of(caller(CAPTURED), stack_inputs()) == 8


@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_model_that_calls_it_is_refused(before: bool) -> None:
    """dynamo makes an operator of torch's checkpoint. What was compiled before holds it, and looks up no name."""
    torch._dynamo.reset()
    model = torch.compile(caller(by_attribute), backend="aot_eager")
    if before:
        train_step(model, stack_inputs())
    message = "switched on or compiled" if before else r"makes an operator(.|\n)*fastac\.compile"
    # Before torch 2.12 backward raises the error, and not fastac's.
    with fastac.patch_checkpoint(), pytest.raises(FastacError if before else Exception, match=message):
        train_step(model, stack_inputs())


def test_verify_would_prove_nothing() -> None:
    with fastac.patch_checkpoint(), pytest.raises(FastacError, match="patch_checkpoint is on"):
        fastac.verify(caller(by_attribute), **stack_inputs())


def test_beside_enable() -> None:
    """Also inside a torch.compile of the whole model."""
    model = caller(lambda block, *args: block(*args))
    fastac.enable(model, blocks="blocks")
    torch._dynamo.reset()
    with fastac.patch_checkpoint():
        for run in (model, torch.compile(model, backend="aot_eager")):
            assert executions_of(run, stack_inputs()) == 4
        fastac.verify(model, **stack_inputs())


def test_once_is_enough() -> None:
    with fastac.patch_checkpoint(), pytest.raises(FastacError, match="called before"):
        fastac.patch_checkpoint()
    with pytest.raises(FastacError, match="'unknown'"):
        fastac.patch_checkpoint("unknown")
    assert torch.utils.checkpoint.checkpoint is CAPTURED.func
