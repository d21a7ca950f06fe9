"""Attention by flex_attention, and a mixture of experts that breaks the graph, in one checkpointed block.

torchtitan pull request 1683: torch.compile gives up such a block, and with it the compiled attention, so attention and
experts were wrapped one by one. Here the block stays one region, attention compiled and saved.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import fastac
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP
from tests.compile.steps import SmallBlock, small_inputs
from tests.compile.test_compile import Experts
from tests.compiler import fresh_compiler as fresh_compiler
from tests.compiler import kernel_folder as kernel_folder
from tests.marks import slow
from tests.support import AttentionStack, relative_error, stack, train_step


def model(attend: Callable[..., torch.Tensor] = flex_attention) -> AttentionStack:
    class Block(SmallBlock):
        def __init__(self) -> None:
            super().__init__(attend)
            self.experts = Experts(support.WIDTH)

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            video = super().forward(video, text)
            return video + self.experts(video)

    return stack(block=Block)


def reference() -> support.Tensors:
    with flex_on_cpu.registered():
        found = train_step(model(), small_inputs(256))
    compiler.reset()
    support.executions.clear()
    return found


@pytest.mark.parametrize("way", [*slow("compiled blocks"), "compiled attention"])
def test_attention_stays_compiled_and_is_saved(way: str) -> None:
    expected = reference()
    with flex_on_cpu.compiled():
        if way == "compiled blocks":
            built = model()
            fastac.compile(built, blocks="blocks")
        else:
            built = model(fastac.compile_attention(flex_attention))
            fastac.enable(built, blocks="blocks")
        for _ in range(2):
            support.executions.clear()
            found = train_step(built, small_inputs(256))
            assert found.keys() == expected.keys()
            assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5
            assert support.executions == {COMPILED_OP: 2}, "compiled, once a call, and never eagerly"
    assert bool(compiler.graph_breaks()) == (way == "compiled blocks")
