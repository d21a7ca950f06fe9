"""fastac as the gradient checkpointing function of a diffusers model: switches, wrapped models, refusals."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support
from tests.hook.hosts import CheckpointsItself, Diffuser, diffuser, step_of
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import executions_of, stack_inputs, state_of, train_step

WAN = "WanTransformer3DModel"


# diffusers' own switches


@pytest.mark.parametrize("is_on", [True, False])
def test_disable_restores_the_user_s_own_checkpointing(is_on: bool) -> None:
    """Also of a module with its own switch. diffusers sets its function on each of these."""
    model = diffuser()
    model.blocks[1].gradient_checkpointing = False
    mine = functools.partial(torch_checkpoint, use_reentrant=False)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=mine)
    if not is_on:
        model.disable_gradient_checkpointing()
    before = state_of(model)
    fastac.enable(model)
    assert step_of(model) == 4
    fastac.disable(model)
    assert state_of(model) == before
    assert step_of(model) == (8 if is_on else 4)


def test_the_model_s_own_switches_after_enable() -> None:
    model = diffuser()
    fastac.enable(model)
    step_of(model)
    model.disable_gradient_checkpointing()  # no region then, and no error
    assert step_of(model) == 4
    assert not fastac.report(model).active
    model.enable_gradient_checkpointing()
    with pytest.raises(
        fastac.PolicyNotAppliedError,
        match=r"replaced fastac's function since\.\nLeave that call out, or call fastac\.enable again",
    ):
        model(**stack_inputs())
    assert "without fastac" in fastac.report(model).problem
    with torch.no_grad():
        model(**stack_inputs())
    fastac.disable(model)
    assert model.is_gradient_checkpointing, "the user's new checkpointing stays"
    assert step_of(model) == 8
    fastac.enable(model)
    assert step_of(model) == 4
    fastac.enable(model, "full")
    model.enable_gradient_checkpointing()  # it is exact, and does what "full" does
    assert step_of(model) == 8
    assert not fastac.report(model).active


# What is refused


def without_blocks() -> Diffuser:
    model = diffuser()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_blocks, r"Diffuser.*blocks=.*'blocks'"),
        (type("Pipeline", (), {"transformer": torch.nn.Linear(1, 1)}), r"pipe\.transformer"),
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
    """It keeps the flag, not the function, as VideoX-Fun does."""

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        self.gradient_checkpointing = kwargs["enable"]


class TakesNoFunction(DropsFunction):
    def enable_gradient_checkpointing(self) -> None:  # type: ignore[override]
        self.gradient_checkpointing = True


@pytest.mark.parametrize("kind", [DropsFunction, TakesNoFunction])
def test_a_class_that_does_not_keep_the_function(kind: type[Diffuser]) -> None:
    """The error says what to write. The model stays as it was: untouched, checkpointing, or enabled."""
    model = diffuser(kind)
    refused = pytest.raises(fastac.FastacError, match=r'fastac\.enable\(model, blocks="blocks"\)')
    before = state_of(model)
    with refused:
        fastac.enable(model)
    assert state_of(model) == before
    fastac.enable(model, blocks="blocks")
    assert step_of(model) == 4
    with refused:
        fastac.enable(model)
    assert step_of(model) == 4
    fastac.disable(model)
    model.enable_gradient_checkpointing()
    with refused:
        fastac.enable(model)
    assert step_of(model) == 8
    with pytest.raises(fastac.FastacError, match=r"on already.*model\.disable_gradient_checkpointing\(\)"):
        fastac.enable(model, blocks="blocks")
    model.disable_gradient_checkpointing()
    fastac.enable(model, blocks="blocks")
    assert step_of(model) == 4


# Other models that are accepted


class Engine(torch.nn.Module):
    """Holds a model as `module`. It is not one of torch's wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=NEEDS_COMPILED_MODELS)])
def test_a_wrapped_model_is_enabled_inside(compiled: bool) -> None:
    """Blocks are named as in the model inside, whatever wraps it."""
    model, inputs = (diffuser(), stack_inputs()) if compiled else support.build(WAN)
    wrapped: Any = Engine(model)
    if compiled:
        wrapped = torch.compile(wrapped, backend="aot_eager")
    before = state_of(model)
    expected = train_step(wrapped, inputs)
    with pytest.raises(fastac.FastacError, match=r"module\.blocks\.0"):
        fastac.enable(wrapped, {"module.blocks.0": "full", "*": "attn_only"})
    fastac.enable(wrapped, {"blocks.0": "full", "*": "attn_only"})
    assert executions_of(wrapped, inputs, expected) == 6
    report = fastac.report(wrapped)
    assert (report.model_class, report.active) == (type(model).__name__, True)
    assert [row.container for row in report.rows] == ["blocks"]
    fastac.disable(wrapped)
    assert state_of(model) == before
    if not compiled:
        found = fastac.verify(wrapped, **inputs, per_block=True)
        assert (found.subject, found.saved) == (WAN, 4)


def test_a_diffusers_model_may_be_enabled_by_its_blocks() -> None:
    model = diffuser()
    before = state_of(model)
    for blocks, policy, executions in (("blocks", "full", 8), (None, "attn_only", 4), ("blocks.1", "full", 6)):
        fastac.enable(model, policy, blocks=blocks)
        assert step_of(model) == executions
    fastac.disable(model)
    assert state_of(model) == before
    model.enable_gradient_checkpointing()
    fastac.enable(model)
    with pytest.raises(fastac.FastacError, match="on already"):  # as soon as fastac's function is gone
        fastac.enable(model, blocks="blocks")
    assert step_of(model) == 4


# Where diffusers is not installed: in a process that cannot import it, nor einops

STEPS = """if True:
    import sys, torch
    sys.modules |= {"diffusers": None, "einops": None}
    import fastac
    from fastac import cli

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layer.processor = print  # as attention modules of diffusers have one
    model = torch.nn.TransformerEncoder(layer, 2)
    x = torch.randn(1, 16, 8, requires_grad=True)
    fastac.enable(model, blocks="layers")
    model(x).sum().backward()
    print(sum(row.saved for row in fastac.report(model).rows))
    print(fastac.verify(model, x).saved)
    print(len(fastac.plan(model, {"src": x}, blocks="layers").policies) > 3)
    assert cli.main(["backends"]) == 0
    assert cli.main(["plan", "wan2.1-t2v-1.3b", "--frames", "5", "--height", "64", "--width", "64"]) == 1
"""


@pytest.mark.slow
def test_enable_verify_report_plan_and_the_commands() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["2", "2", "True"]
    assert "pip install 'diffusers>=0.33'" in done.stderr
