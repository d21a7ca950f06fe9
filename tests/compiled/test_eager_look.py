"""Compiled code cannot be watched: once for a block class and policy it is run again, eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests.compiled.steps import SmallBlock, compile_blocks, hiding, small, small_inputs
from tests.support import train_step, written_out


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
    def run(kind: type, backend: Any) -> None:
        block = kind()
        block.compile(backend=backend)
        fastac.checkpoint(lambda *args: block(*args), *small_inputs().values())

    run(SmallBlock, "eager")
    with pytest.raises(PolicyNotAppliedError, match="eager mode"):
        run(type("Other", (SmallBlock,), {}), hiding)


def test_python_code_of_the_block_runs_again() -> None:
    """As docs/limits.md says: a counter of the block's own is moved once more. For another size it is not."""
    runs = []

    @torch.compiler.disable
    def attend(*heads: torch.Tensor) -> torch.Tensor:
        runs.append(heads)
        return F.scaled_dot_product_attention(*heads)

    block = SmallBlock(attend)
    block.compile(backend="eager")
    for tokens, expected in ((24, 2), (16, 1), (20, 1)):
        runs.clear()
        fastac.checkpoint(block, *small_inputs(tokens).values())
        assert len(runs) == expected
