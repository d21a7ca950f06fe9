"""Traces that are neither dynamo's nor AOT's, export, and steps on fake tensors."""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
from tests import support
from tests.marks import NEEDS_TRACES
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, executions_of, stack, stack_inputs, train_step


def test_compiled_autograd() -> None:
    """It traces the backward. The graph unpacks saved tensors, and so recomputes, when it runs."""
    expected = train_step(stack(layers=1), stack_inputs())
    model = stack(layers=1, policy="attn_only")
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            assert executions_of(model, stack_inputs(), expected) == 2


@pytest.mark.parametrize(
    ("how", "strict"), [("checkpoint", False), ("blocks", True), ("full", True), ("linear", False)]
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
def test_make_fx_traces_the_region_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A recompute in such a graph would be nothing but more of the same operators."""

    def graph_under(policy: str) -> Counter[str]:
        def gradients(video: torch.Tensor, text: torch.Tensor) -> Any:
            return torch.autograd.grad(model(video, text).square().sum(), list(model.parameters()))

        model = stack(layers=1, policy=policy)
        return Counter(str(node.target) for node in make_fx(gradients)(*stack_inputs().values()).graph.nodes)

    with caplog.at_level(logging.WARNING, logger="fastac"):
        plain, *traced = [graph_under(one) for one in ("none", "attn_only", "full")]
    assert caplog.text.count("neither dynamo nor AOT") == 1
    assert traced == [plain, plain]
    assert plain[f"{CPU_ATTENTION.replace('::', '.')}.default"] == 2


def pairs(how: str) -> torch.nn.Module:
    """A model that symbolic traces can follow. how: its blocks take tensors, or a tuple as the only argument."""

    class Block(torch.nn.Linear):
        def forward(self, state: Any) -> Any:
            x, rest = state if how == "tuples" else (state, None)
            x = x + F.scaled_dot_product_attention(super().forward(x), x, x)
            return (x, rest) if how == "tuples" else x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(8, 8), Block(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state: Any = (x, 1) if how == "tuples" else x
            for block in self.blocks:
                state = block(state)
            return state[0] if how == "tuples" else state

    torch.manual_seed(0)
    return Model()


def enabled_pairs(how: str, policy: str) -> torch.nn.Module:
    model = pairs(how)
    fastac.enable(model, policy, blocks="blocks")
    return model


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("how", ["tensors", "tuples", "fastac.checkpoint"])
def test_a_symbolic_trace_is_refused(how: str, policy: str) -> None:
    """Its graph would hold the blocks without their checkpoints. Without fastac it traces them."""
    model = enabled_pairs(how, policy)
    if how == "fastac.checkpoint":
        block = pairs(how).blocks[0]
        model.forward = lambda x: fastac.checkpoint(block, x, policy=policy)
    for _ in range(2):
        with pytest.raises(fastac.FastacError, match=r"torch\.fx\.symbolic_trace(?s:.*)fastac\.disable"):
            torch.fx.symbolic_trace(model)
    x = torch.randn(1, 2, 4, 8)
    for change in (fastac.disable, lambda model: fastac.enable(model, "none", blocks="blocks")):
        model = enabled_pairs(how, policy)
        change(model)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), pairs(how)(x))


@pytest.mark.parametrize(("how", "policy", "executions"), [("tensors", "attn_only", 2), ("tuples", "full", 4)])
def test_torch_jit_trace_holds_no_checkpoint(how: str, policy: str, executions: int) -> None:
    """With gradients on. As exported programs, the traced one recomputes nothing, and is exact."""
    model, plain = enabled_pairs(how, policy), pairs(how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (DeprecationWarning, torch.jit.TracerWarning))
        traced = torch.jit.trace(model, torch.randn(1, 2, 4, 8))
    inputs = {"x": torch.randn(1, 2, 4, 8)}
    assert executions_of(model, inputs, train_step(plain, inputs)) == executions
    for one in (traced, plain):
        one.zero_grad()
        one(**inputs).square().mean().backward()
    assert_same(support.gradients(dict(model.named_parameters())), support.gradients(dict(plain.named_parameters())))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().mean())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[0],
    "jacrev": lambda model, x: torch.func.jacrev(lambda x: model(x).mean())(x),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).square().mean()))(x[None]),
}


@pytest.mark.parametrize(("policy", "executions"), [("attn_only", 2), ("full", 4)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_refused(transform: str, policy: str, executions: int) -> None:
    """They switch off the hooks by which checkpoints work. Nothing changes: steps before and after are exact."""
    model, x = enabled_pairs("tensors", policy), torch.randn(1, 2, 4, 8)
    expected = train_step(pairs("tensors"), {"x": x})
    refused = pytest.raises(fastac.FastacError, match=r"torch\.func(?s:.*)fastac\.disable.*\"none\"")
    for _ in range(3):
        with refused as error:
            TRANSFORMS[transform](model, x)
        assert "open an issue" not in str(error.value)
        assert executions_of(model, {"x": x}, expected) == executions
    with refused:
        TRANSFORMS[transform](functools.partial(fastac.checkpoint, pairs("tensors"), policy=policy), x)
    fastac.disable(model)
    TRANSFORMS[transform](model, x)
    fastac.enable(model, "none", blocks="blocks")
    TRANSFORMS[transform](model, x)


# Fake tensors


@NEEDS_TRACES
def test_a_training_step_on_fake_tensors() -> None:
    """From the second equal call on, the cache of fake tensors answers: no call reaches the tape."""
    mode = FakeTensorMode()
    with mode:
        block = AttentionBlock()
        inputs = [torch.randn(value.shape) for value in stack_inputs().values()]
        for _ in range(3):
            fastac.checkpoint(lambda: block(*inputs)).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
