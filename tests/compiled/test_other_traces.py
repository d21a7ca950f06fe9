"""Traces that are neither dynamo's nor AOT's, export, and steps on fake tensors."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
from fastac.compiled import tracing
from tests.marks import NEEDS_TRACES
from tests.support import CPU_ATTENTION, AttentionBlock, executions_of, stack, stack_inputs, train_step


def test_compiled_autograd() -> None:
    """It traces the backward. The graph unpacks saved tensors, and so recomputes, when it runs."""
    expected = train_step(stack(layers=1), stack_inputs())
    model = stack(layers=1, policy="attn_only")
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            assert executions_of(model, stack_inputs(), expected) == 2


@pytest.mark.parametrize(
    ("how", "strict"),
    [("checkpoint", True), ("checkpoint", False), ("blocks", True), ("full", True), ("linear", False)],
)
def test_export_holds_no_checkpoint(how: str, strict: bool) -> None:
    model, inputs = stack(policy="attn_only" if how == "checkpoint" else "none"), stack_inputs()
    if how != "checkpoint":
        policies = {"blocks": "attn_only", "full": "full", "linear": fastac.Policy("attn_only", linear=("ffn.*",))}
        fastac.enable(model, policies[how], blocks="blocks")
    program = torch.export.export(model, (), inputs, strict=strict)
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if "checkpoint" in name]
    assert any("scaled_dot_product_attention" in name for name in names)
    assert torch.equal(program.module()(**inputs), model(**inputs))


@NEEDS_TRACES
@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_make_fx_traces_the_region_as_it_is(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """A recompute in such a graph would be nothing but more of the same operators."""

    def graph_under(policy: str) -> Counter[str]:
        def gradients(video: torch.Tensor, text: torch.Tensor) -> Any:
            return torch.autograd.grad(model(video, text).square().sum(), list(model.parameters()))

        model = stack(layers=1, policy=policy)
        return Counter(str(node.target) for node in make_fx(gradients)(*stack_inputs().values()).graph.nodes)

    tracing._warn.cache_clear()  # another test may have been the first to trace
    with caplog.at_level(logging.WARNING, logger="fastac"):
        plain, *traced = [graph_under(one) for one in ("none", policy, policy)]
    assert caplog.text.count("neither dynamo nor AOT") == 1
    assert traced == [plain, plain]
    assert plain[f"{CPU_ATTENTION.replace('::', '.')}.default"] == 2


# Fake tensors


def to_fake(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Take the data out of a model's parameters."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(parameter.detach()))
    return model


@NEEDS_TRACES
def test_a_training_step_on_fake_tensors() -> None:
    """From the second equal call on, the cache of fake tensors answers: no call reaches the tape."""
    mode = FakeTensorMode()
    block = to_fake(AttentionBlock(), mode)
    inputs = [mode.from_tensor(value.detach()) for value in stack_inputs().values()]
    with mode:
        for _ in range(3):
            fastac.checkpoint(lambda: block(*inputs)).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
