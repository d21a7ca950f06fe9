"""Attention by flex_attention, and a mixture of experts that breaks the graph, in one checkpointed block.

torchtitan pull request 1683: torch.compile gives up such a block, and with it the compiled attention, so attention and
experts were wrapped one by one. Here the block stays one region, attention compiled and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import fastac
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP
from tests.compile.test_compile import Experts
from tests.compile.test_flex import Model, block_class, inputs
from tests.marks import slow
from tests.support import relative_error, train_step


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path: Path) -> Iterator[None]:
    support.executions.clear()
    with compiler.fresh(tmp_path):
        yield


def model(attend: Callable[..., torch.Tensor] = flex_attention) -> Model:
    class Block(block_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(attend)
            self.experts = Experts(16)

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            video = super().forward(video)
            return video + self.experts(video)

    torch.manual_seed(0)
    return Model(Block)


def reference() -> support.Tensors:
    with flex_on_cpu.registered():
        found = train_step(model(), inputs())
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
            found = train_step(built, inputs())
            assert found.keys() == expected.keys()
            assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-5
            assert support.executions == {COMPILED_OP: 2}, "compiled, once a call, and never eagerly"
    assert bool(compiler.graph_breaks()) == (way == "compiled blocks")
