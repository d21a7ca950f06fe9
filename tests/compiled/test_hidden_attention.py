"""Compiled code inside an eager block hides its attention: an error.

flex_attention compiled by inductor leaves no call to see. On a CPU it has no backward, so a compiler of the test hides
the op in the same way: it replaces it by a plain function in the compiled forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention as flex

import fastac
from tests import support
from tests.support import train_step

HIDDEN = "attention inside compiled code"
REFUSED = pytest.raises(fastac.PolicyNotAppliedError, match="flex_attention")


def _hidden(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    support.executions[HIDDEN] += 1
    output, statistics = support.attention_math(query, key, value)
    return output, statistics / math.log(2), statistics


def _hide(module: Any, _: Any) -> Any:
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.flex_attention:
            node.target = _hidden
    module.recompile()
    return module


hiding = aot_autograd(fw_compiler=_hide, bw_compiler=lambda module, _: module)


@pytest.fixture(autouse=True)
def _flex_trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    support.executions.clear()


class Block(torch.nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.out = torch.nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.attend(torch.tanh(query), key, value)))


def block(attend: Callable[..., Any]) -> Block:
    torch.manual_seed(0)
    return Block(attend)


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 128, 8)
    return {n: torch.randn(shape, generator=generator).requires_grad_() for n in ("query", "key", "value")}


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows with every eager execution of flex_attention."""
    executed: list[int] = []
    op = torch.ops.higher_order.flex_attention
    eager = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]

    def counted(*args: Any) -> Any:
        executed.append(1)
        return eager(*args)

    monkeypatch.setitem(op.py_kernels, torch._C.DispatchKey.CompositeExplicitAutograd, counted)
    op._dispatch_cache.clear()
    yield executed
    op._dispatch_cache.clear()


def test_flex_attention_that_is_compiled_on_its_own_is_refused(eager_flex: list[int]) -> None:
    """The eager look does not run it: that would hold all scores in memory."""
    model = block(torch.compile(flex.flex_attention, backend=hiding))
    for _ in range(2):
        with REFUSED:
            train_step(functools.partial(fastac.checkpoint, model), inputs())
    train_step(model, inputs())
    assert support.executions[HIDDEN], "it did run compiled"
    assert not eager_flex


def test_in_a_first_block_whose_attention_needs_no_gradient() -> None:
    """The feed-forward alone trains: the autograd graph shows nothing of the compiled code."""

    class FeedForwardAlone(torch.nn.Module):
        def __init__(self, attend: Callable[..., Any]) -> None:
            super().__init__()
            self.attend = attend
            self.qkv = torch.nn.Linear(8, 24).requires_grad_(False)
            self.ffn = torch.nn.Linear(8, 8)

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            return video + self.ffn(self.attend(*self.qkv(video).chunk(3, -1)))

    block, video = FeedForwardAlone(torch.compile(flex.flex_attention, backend=hiding)), torch.randn(1, 2, 128, 8)
    for _ in range(2):  # compiled in the region, or before it
        with REFUSED:
            fastac.checkpoint(block, video)


def test_eager_flex_attention_is_not_taken_for_compiled_code(eager_flex: list[int]) -> None:
    """It compiles something itself. A look at every block would cost a forward."""
    for _ in range(2):
        train_step(functools.partial(fastac.checkpoint, block(flex.flex_attention)), inputs())
    assert len(eager_flex) == 2
