"""flex_attention in eager mode, where it is a higher-order op, through its eager math implementation."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import fastac
from fastac.backends.flex import ROWS
from tests import support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import OP
from tests.backends.parity import Case, Parity
from tests.support import assert_same, train_step


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with flex_on_cpu.registered():
        yield


def nearer_is_better(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - (query - key).abs() * 0.1


# NABLA: the keys each block of queries attends to are chosen inside the region, by their share of the attention.
BLOCK, TOKENS, SHARE = 8, 32, 0.6


def nabla(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen_by: torch.Tensor) -> torch.Tensor:
    """The fewest blocks that get so large a share, by the mean tokens."""
    means = [t.unflatten(-2, (-1, BLOCK)).mean(-2) for t in (chosen_by, key)]
    share = torch.softmax(means[0] @ means[1].transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1)
    values, places = share.sort(-1)
    keep = (values.cumsum(-1) >= 1 - SHARE).gather(-1, places.argsort(-1)).int()
    count, order = keep.sum(-1).int(), keep.argsort(dim=-1, descending=True, stable=True).int()

    def is_chosen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return keep[batch, head, query // BLOCK, key // BLOCK] > 0

    mask = BlockMask.from_kv_blocks(torch.zeros_like(count), order, count, order, BLOCK_SIZE=BLOCK, mask_mod=is_chosen)
    return flex_attention(query, key, value, block_mask=mask)


class TestFlex(Parity):
    cases = (
        Case(OP, lambda q, k, v, _: flex_attention(q, k, v, enable_gqa=True), heads=4, kv_heads=2),
        Case(OP, lambda q, k, v, _: flex_attention(q, k, v, score_mod=nearer_is_better), "score_mod", sparse=True),
        Case(OP, lambda q, k, v, _: nabla(q, k, v, q), "nabla", queries=TOKENS, keys=TOKENS, sparse=True),
    )
    test_flops = None  # type: ignore[assignment]  # torch's counter fails on it: see tests/test_flops.py
    rows = ROWS[:1]  # the other, of compiled code: tests/compile/test_flex.py


def inputs(tokens: int = TOKENS) -> support.Tensors:
    return Case(OP, nabla, batch=2, queries=tokens, keys=tokens).inputs()


def test_the_chosen_blocks_are_those_of_the_forward() -> None:
    """Scores that come out otherwise in recompute must not choose other keys than the saved output is made of."""
    noise = torch.Generator().manual_seed(5)

    def noisy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = torch.tanh(query)
        disturbed = query.detach() + torch.randn(query.shape, generator=noise)  # another one with each run
        return torch.tanh(nabla(query, key, value, disturbed))

    tensors = inputs()
    reference = train_step(noisy, tensors)
    noise.manual_seed(5)
    assert_same(train_step(functools.partial(fastac.checkpoint, noisy), tensors), reference)
    noise.manual_seed(5)
    with pytest.raises(fastac.FastacError, match="recompute does not compute what the forward did"):
        train_step(functools.partial(fastac.checkpoint, noisy, policy="full"), tensors)


def test_a_recompute_that_chooses_more_often_is_an_error() -> None:
    runs: Counter[str] = Counter()

    def unsteady(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs["forward"] += 1
        for _ in range(runs["forward"]):
            query.mean(-1).topk(2)
        return torch.tanh(nabla(query, key, value, query))

    with pytest.raises(fastac.FastacError, match=r"topk|sort"):
        train_step(functools.partial(fastac.checkpoint, unsteady), inputs())


def test_nabla_of_diffusers(attention_executions: Counter[str]) -> None:
    """Kandinsky's own choice of blocks, which changes what it sorted in place."""
    from diffusers.models.transformers.transformer_kandinsky import nablaT_v2

    def kandinsky(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = torch.tanh(query), torch.tanh(key)
        mask = nablaT_v2(query.transpose(1, 2), key.transpose(1, 2), torch.eye(3).bool(), thr=SHARE)
        return torch.tanh(flex_attention(query, key, value, block_mask=mask))

    tensors = inputs(tokens=3 * 64)
    reference = train_step(kandinsky, tensors)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, kandinsky), tensors), reference)
    assert attention_executions == {OP: 1}


@pytest.mark.parametrize("where", ["inside", "around", "alone"])
def test_in_compiled_blocks(where: str, attention_executions: Counter[str]) -> None:
    """The higher-order op stays a call in a compiled graph, where its output is saved from the first step on."""

    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Any = flex_attention) -> Any:
        return torch.tanh(attend(torch.tanh(query), key, value))

    tensors = inputs()
    reference = train_step(block, tensors)
    torch.compiler.reset()
    if where == "inside":  # checkpointing around compiled code
        run = functools.partial(fastac.checkpoint, torch.compile(block, backend="aot_eager"))
    elif where == "alone":
        run = functools.partial(fastac.checkpoint, block, attend=torch.compile(flex_attention, backend="aot_eager"))
    else:
        run = torch.compile(lambda **given: fastac.checkpoint(block, **given), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(run, tensors), reference)
        assert attention_executions == {OP: 1}
