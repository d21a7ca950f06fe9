"""Attention by flex_attention, and a mixture of experts that breaks the graph, in one checkpointed block.

torchtitan pull request 1683: torch.compile gives up such a block, and with it the compiled attention, so attention and
experts were wrapped one by one. Here the block stays one region, attention compiled and saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP, OP
from tests.compile.test_flex import Model, block_class, inputs
from tests.support import relative_error, train_step


class Experts(torch.nn.Module):
    """A mixture of experts, of which the data choose one per token: a graph cannot know how many an expert gets."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        found = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            mine = (chosen == place).nonzero().flatten()
            if mine.numel():
                found = found.index_add(0, mine, expert(flat[mine]) * share[mine, None])
        return found.view_as(tokens)


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


def test_torch_alone_runs_the_block_eagerly() -> None:
    """What the thread is about: asked to compile, torch compiles nothing, and attention runs twice a step."""
    built = model()
    for block in built.blocks:
        block.forward = functools.partial(torch_checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    built.compile(backend="aot_eager")
    with flex_on_cpu.registered():
        train_step(built, inputs())
    assert support.executions == {OP: 4}
    assert compiler.graphs() == 1, "the one that flex_attention makes of itself in eager mode"


@pytest.mark.parametrize("way", ["compiled blocks", "compiled attention"])
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
