"""flex_attention in eager mode, where it is a higher-order op, through its eager math implementation."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_kandinsky import nablaT_v2
from torch.nn.attention.flex_attention import flex_attention

import fastac
from fastac.backends.flex import ROWS
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import OP
from tests.backends.parity import Case, Parity
from tests.support import assert_same, train_step


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with flex_on_cpu.registered():
        yield


TOKENS = 3 * 64


def nabla(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, noise: torch.Tensor | float) -> torch.Tensor:
    """The blocks of keys that each block of 64 queries attends to are chosen by their share of the attention, as
    diffusers does it, which changes what it sorted in place."""
    mask = nablaT_v2((query + noise).transpose(1, 2), key.transpose(1, 2), torch.eye(3).bool(), thr=0.6)
    return flex_attention(query, key, value, block_mask=mask)  # type: ignore[return-value]


class TestFlex(Parity):
    cases = (
        Case(OP, lambda q, k, v, _: flex_attention(q, k, v, enable_gqa=True), heads=4, kv_heads=2),
        Case(
            OP, lambda q, k, v, _: flex_attention(q, k, v, lambda s, b, h, m, n: s - (m - n).abs() * 0.1), "score_mod"
        ),
        Case(OP, lambda q, k, v, _: nabla(q, k, v, 0.0), "nabla", queries=TOKENS, keys=TOKENS),
    )
    test_flops = None  # type: ignore[assignment]  # torch's counter fails on it: see tests/test_flops.py
    rows = ROWS[:1]  # the other, of compiled code: tests/compiled/test_flex.py


@pytest.mark.parametrize("where", ["inside", "around", "alone"])
def test_in_compiled_blocks(where: str, attention_executions: Counter[str]) -> None:
    """The higher-order op stays a call in a compiled graph, where its output is saved from the first step on."""

    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Any = flex_attention) -> Any:
        return torch.tanh(attend(torch.tanh(query), key, value))

    inputs = TestFlex.cases[1].inputs()
    expected = train_step(block, inputs)
    torch.compiler.reset()
    if where == "inside":  # checkpointing around compiled code
        run = functools.partial(fastac.checkpoint, torch.compile(block, backend="aot_eager"))
    elif where == "alone":
        run = functools.partial(fastac.checkpoint, block, attend=torch.compile(flex_attention, backend="aot_eager"))
    else:
        run = torch.compile(lambda **given: fastac.checkpoint(block, **given), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(run, inputs), expected)
        assert attention_executions == {OP: 1}
