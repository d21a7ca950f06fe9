"""Compiled code cannot be watched: once for a block class and policy it is run again, eagerly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests.compiled.steps import SmallBlock, compile_blocks, hiding, small, small_inputs
from tests.support import train_step, written_out


def test_another_size_is_not_run_again(attention_executions: Counter[str]) -> None:
    model = compile_blocks(small("attn_only"), "eager")
    found = []
    for tokens in (24, 16, 20):
        attention_executions.clear()
        train_step(model, small_inputs(tokens))
        found.append(attention_executions.total())
    assert found == [3, 2, 2]


def test_another_size_with_fewer_calls(caplog: pytest.LogCaptureFixture) -> None:
    """Attention that runs as small ops for some sizes would be hidden in compiled code."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (F.scaled_dot_product_attention if key.shape[2] > 16 else written_out)(query, key, value)

    model = compile_blocks(small("attn_only", attend=attend), "eager")
    for tokens in (24, 16, 12, 24):
        train_step(model, small_inputs(tokens))
    assert caplog.text.count("fewer attention calls") == 1


def test_after_inputs_too_short_for_the_policy() -> None:
    """Images come before videos: what the policy saves of these was not judged with those."""
    model = compile_blocks(small(Policy(min_kv=20), attend=written_out), "eager")
    train_step(model, small_inputs(16))
    with pytest.raises(PolicyNotAppliedError, match="written out"):
        train_step(model, small_inputs(24))


def test_a_closure_that_runs_another_class() -> None:
    class Other(SmallBlock):
        pass

    def run(block: torch.nn.Module, backend: Any) -> None:
        block.compile(backend=backend)
        fastac.checkpoint(lambda *args: block(*args), *small_inputs().values())

    run(SmallBlock(), "eager")
    with pytest.raises(PolicyNotAppliedError, match="eager mode"):
        run(Other(), hiding)


def test_python_code_of_the_block_runs_again() -> None:
    """As docs/limits.md says: a counter of the block's own is moved once more."""
    runs = Counter[str]()

    class Counting(SmallBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            count()
            return super().forward(video, text)

    @torch.compiler.disable
    def count() -> None:
        runs["forward"] += 1

    block = Counting()
    block.compile(backend="eager")
    for tokens in (24, 16):
        runs.clear()
        fastac.checkpoint(block, *small_inputs(tokens).values())
        assert runs["forward"] == 1 + (tokens == 24)
