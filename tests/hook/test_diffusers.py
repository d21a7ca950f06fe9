"""enable as the gradient checkpointing function of a diffusers model: its switches, wrappers around it, refusals."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support
from tests.hook.hosts import CheckpointsItself, Diffuser, diffuser, step_of
from tests.marks import NEEDS_COMPILED_MODELS
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, stack_inputs, train_step

WAN = "WanTransformer3DModel"


# diffusers' own switches


def test_disable_restores_the_user_s_own_checkpointing(attention_executions: Counter[str]) -> None:
    def mine(block: Any, *args: Any) -> Any:
        return torch_checkpoint(block, *args, use_reentrant=False)

    model = diffuser()
    model.enable_gradient_checkpointing(gradient_checkpointing_func=mine)
    before = state_of(model)
    fastac.enable(model)
    assert step_of(model, attention_executions) == 4
    fastac.disable(model)
    assert state_of(model) == before
    assert model._gradient_checkpointing_func is mine
    assert step_of(model, attention_executions) == 8


def test_disable_restores_a_checkpointing_that_was_switched_off() -> None:
    """Also of a module with a switch of its own: diffusers sets its function on every one, where there was none too."""
    model = diffuser()
    model.blocks[1].gradient_checkpointing = False
    model.enable_gradient_checkpointing()
    model.disable_gradient_checkpointing()
    before = state_of(model)
    fastac.enable(model)
    fastac.disable(model)
    assert state_of(model) == before


def test_diffusers_own_disable_works_as_without_fastac(attention_executions: Counter[str]) -> None:
    """A model whose checkpointing was disabled opens no region, and that is right."""
    model = diffuser()
    fastac.enable(model)
    step_of(model, attention_executions)
    model.disable_gradient_checkpointing()
    assert step_of(model, attention_executions) == 4
    assert not fastac.report(model).active
    fastac.enable(model, "full")
    assert step_of(model, attention_executions) == 8


def test_checkpointing_enabled_again_without_fastac(attention_executions: Counter[str]) -> None:
    model = diffuser()
    fastac.enable(model)
    step_of(model, attention_executions)
    model.enable_gradient_checkpointing()
    with pytest.raises(
        fastac.PolicyNotAppliedError, match=r"function was replaced\.\nCall fastac\.enable after that\.$"
    ):
        model(**stack_inputs())
    assert "without fastac" in fastac.report(model).problem
    with torch.no_grad():
        model(**stack_inputs())
    fastac.disable(model)
    assert model.is_gradient_checkpointing, "the user's new checkpointing stays"
    assert step_of(model, attention_executions) == 8
    fastac.enable(model)
    assert step_of(model, attention_executions) == 4


# What is refused


class WithoutBlocks(ModelMixin, ConfigMixin):
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


class Pipeline:
    transformer = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WithoutBlocks, r"WithoutBlocks.*blocks=.*'layers'"),
        (Pipeline, r"pipe\.transformer"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_cannot_be_enabled(make: Any, message: str) -> None:
    model = make()
    for call in (fastac.enable, fastac.compile, functools.partial(fastac.plan, inputs={})):
        with pytest.raises(fastac.FastacError, match=message):
            call(model)
    assert not hasattr(model, "_fastac")


class DropsFunction(CheckpointsItself):
    """As VideoX-Fun's: it keeps the flag alone."""

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        self.gradient_checkpointing = kwargs["enable"]


class TakesNoFunction(DropsFunction):
    def enable_gradient_checkpointing(self) -> None:  # type: ignore[override]
        self.gradient_checkpointing = True


@pytest.mark.parametrize("kind", [DropsFunction, TakesNoFunction])
def test_a_class_that_does_not_keep_the_function(kind: type[Diffuser], attention_executions: Counter[str]) -> None:
    """The error says what to write, and leaves the model as it was: untouched, checkpointing, or enabled."""
    model = diffuser(kind)
    refused = pytest.raises(fastac.FastacError, match=r'fastac\.enable\(model, blocks="blocks"\)')
    before = state_of(model)
    with refused:
        fastac.enable(model)
    assert state_of(model) == before
    fastac.enable(model, blocks="blocks")
    assert step_of(model, attention_executions) == 4
    with refused:
        fastac.enable(model)
    assert step_of(model, attention_executions) == 4
    fastac.disable(model)
    model.enable_gradient_checkpointing()
    with refused:
        fastac.enable(model)
    assert step_of(model, attention_executions) == 8
    with pytest.raises(fastac.FastacError, match=r"on already.*model\.disable_gradient_checkpointing\(\)"):
        fastac.enable(model, blocks="blocks")
    model.disable_gradient_checkpointing()
    fastac.enable(model, blocks="blocks")
    assert step_of(model, attention_executions) == 4


# What is said, and what else is taken


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line for enable, one for what the first region of each kind saves; no warning in a normal run."""
    caplog.set_level(logging.INFO, "fastac")
    model = diffuser()
    fastac.enable(model)
    for _ in range(3):
        train_step(model, stack_inputs())
    fastac.report(model)
    fastac.disable(model)
    assert len(caplog.records) == 2
    assert all(record.levelname == "INFO" for record in caplog.records)
    assert "Diffuser: policy attn_only" in caplog.messages[0]
    assert "blocks.0: 2 attention calls, 2 saved" in caplog.messages[1]


class Engine(torch.nn.Module):
    """Holds a model as `module`, and is none of torch's own wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=NEEDS_COMPILED_MODELS)])
def test_a_wrapped_model_is_enabled_inside(compiled: bool, attention_executions: Counter[str]) -> None:
    """Block names are those of the model inside, whatever it is wrapped in."""
    model, inputs = support.build(WAN)
    wrapped: Any = Engine(model)
    if compiled:
        wrapped = torch.compile(wrapped, backend="eager")
    before = state_of(model)
    expected = train_step(wrapped, inputs)
    with pytest.raises(fastac.FastacError, match=r"module\.blocks\.0"):
        fastac.enable(wrapped, {"module.blocks.0": "full", "*": "attn_only"})
    for policy, executions in (("attn_only", 4), ({"blocks.0": "full", "*": "attn_only"}, 6)):
        fastac.enable(wrapped, policy)
        attention_executions.clear()
        assert_same(train_step(wrapped, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: executions}
        report = fastac.report(wrapped)
        assert (report.model_class, report.active) == (WAN, True)
        assert [row.container for row in report.rows] == ["blocks"]
    fastac.disable(wrapped)
    assert state_of(model) == before
    found = fastac.verify(wrapped, **inputs, per_block=True)
    assert (found.subject, found.saved) == (WAN, 4)


def test_a_diffusers_model_may_be_enabled_by_its_blocks(attention_executions: Counter[str]) -> None:
    """Nothing is left of being enabled as a whole."""
    model = diffuser()
    before = state_of(model)
    for blocks, policy, executions in (("blocks", "full", 8), (None, "attn_only", 4), ("blocks.1", "full", 6)):
        fastac.enable(model, policy, blocks=blocks)
        assert step_of(model, attention_executions) == executions
    fastac.disable(model)
    assert state_of(model) == before
    model.enable_gradient_checkpointing()
    fastac.enable(model)
    with pytest.raises(fastac.FastacError, match="on already"):  # as soon as fastac's function is gone
        fastac.enable(model, blocks="blocks")
    assert step_of(model, attention_executions) == 4
