"""fastac.checkpoint where a model calls its blocks itself, and what a step reports. Ways of training: tests/ways."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastac
from fastac.models import MODELS
from tests import support
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, stack_inputs, train_step

WAN = "WanTransformer3DModel"
CALLS = 4
"""Attention calls in one forward of the tiny Wan model."""


def test_drop_in_for_torch_checkpoint(attention_executions: Counter[str]) -> None:
    """fastac.checkpoint takes the arguments of torch.utils.checkpoint.checkpoint and hands the function the rest."""
    inputs = stack_inputs()
    block = AttentionBlock()
    reference = train_step(block, inputs)
    options = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default", "early_stop": True}
    leaves = support.leaves_of(block, inputs)
    for tensor in leaves.values():
        tensor.grad = None
    attention_executions.clear()
    output = fastac.checkpoint(block, inputs["video"], text=inputs["text"], **options)
    support.loss_of(output).backward()
    assert_same(support.gradients(leaves) | {"output": output.detach()}, reference)
    assert attention_executions == {CPU_ATTENTION: 2}


class ScaledBlock(AttentionBlock):
    """Called in other ways than block(video, text)."""

    def scaled(self, video: torch.Tensor, text: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> torch.Tensor:
        return self.forward(video, text) * scale + (extra["shift"] if extra else 0)


CALLABLES: dict[str, Callable[[ScaledBlock], Callable[..., torch.Tensor]]] = {
    "module": lambda block: block,
    "bound __call__": lambda block: block.__call__,  # Cosmos3 and PRX in diffusers
    "bound forward": lambda block: block.forward,
    "bound method": lambda block: block.scaled,
    "partial of a method": lambda block: functools.partial(block.scaled, scale=0.5),
    "partial of a module": lambda block: functools.partial(block),
    "closure": lambda block: lambda video, text: block(video, text),
    "wrapped function": lambda block: functools.wraps(block.forward)(lambda *args: block(*args)),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables(kind: str, attention_executions: Counter[str]) -> None:
    inputs = stack_inputs()
    torch.manual_seed(0)
    block = ScaledBlock()
    function = CALLABLES[kind](block)
    leaves = support.leaves_of(block, inputs)

    def step(call: Callable[..., torch.Tensor]) -> support.Tensors:
        for tensor in leaves.values():
            tensor.grad = None
        output = call(inputs["video"], inputs["text"])
        support.loss_of(output).backward()
        return {"output": output.detach()} | support.gradients(leaves)

    reference = step(function)
    for _ in range(2):
        attention_executions.clear()
        assert_same(step(functools.partial(fastac.checkpoint, function)), reference)
        assert attention_executions == {CPU_ATTENTION: 2}


def test_keyword_arguments_reach_the_block(attention_executions: Counter[str]) -> None:
    """WanAnimate2 passes them, where diffusers' own function raises. Tensors may sit in a dict."""
    inputs = stack_inputs()
    shift = torch.randn(support.WIDTH, requires_grad=True)
    torch.manual_seed(0)
    block = ScaledBlock()
    nested = {**inputs, "scale": 0.25, "extra": {"shift": shift}}
    reference = train_step(block.scaled, nested) | support.gradients(support.leaves_of(block, {}))
    block.zero_grad()
    attention_executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block.scaled), nested)
    assert_same(found | support.gradients(support.leaves_of(block, {})), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


def test_outputs_of_any_structure(attention_executions: Counter[str]) -> None:
    class Structured(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
            output = super().forward(video, text)
            return {"video": output, "both": (output[:, :3], None, [output.mean()]), "count": 3}

    inputs = stack_inputs()
    torch.manual_seed(0)
    block = Structured()
    reference = train_step(block, inputs) | support.gradients(support.leaves_of(block, {}))
    block.zero_grad()
    attention_executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block), inputs)
    assert_same(found | support.gradients(support.leaves_of(block, {})), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


# What one model reports


def test_report_tells_the_bytes_that_are_held() -> None:
    """Outputs and statistics of every attention call, to the byte; tests/test_tape.py measures that they are held."""
    model, inputs = support.build(WAN)
    fastac.enable(model)
    train_step(model, inputs)
    config = MODELS[WAN].config
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    _, _, frames, height, width = inputs["hidden_states"].shape
    tokens = frames * height * width // 4  # patches of 1 x 2 x 2
    (row,) = fastac.report(model).rows
    assert (row.attention_calls, row.saved, row.recomputed) == (CALLS, CALLS, 0)
    assert row.saved_bytes == CALLS * tokens * heads * (head_dim + 1) * 4


def test_math_kernel_is_never_silent() -> None:
    """The check of this file: if attention could not be saved, a test that only compares gradients would not see it."""
    model, inputs = support.build(WAN)
    fastac.enable(model)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fastac.PolicyNotAppliedError):
        train_step(model, inputs)
