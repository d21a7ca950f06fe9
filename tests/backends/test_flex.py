"""flex_attention in eager mode, where it is a higher-order op, through its eager math implementation."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fastac
from fastac.engine import interception
from fastac.backends.flex import ROWS
from fastac.scopes import thread
from tests import support
from tests.backends import flex_on_cpu
from tests.backends.parity import QUERIES, Case, Parity, causal
from tests.support import assert_same, train_step

OP = flex_on_cpu.OP


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with flex_on_cpu.registered():
        yield


def attend(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, p: flex_attention(q, k, v, **options)


def is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def nearer_is_better(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - (query - key).abs() * 0.1


def distance(queries: int, keys: int) -> torch.Tensor:
    return -(torch.arange(queries)[:, None] - torch.arange(keys)).abs() * 0.1


CAUSAL = create_block_mask(is_causal, None, None, QUERIES, QUERIES, device="cpu")

# NABLA: the keys each block of queries attends to are chosen inside the region, by their share of the attention.
BLOCK, BLOCKS, SHARE = 8, 4, 0.6


def chosen(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(batch, heads, blocks of queries, blocks of keys): the fewest that get so large a share, by the mean tokens."""
    means = [t.unflatten(-2, (-1, BLOCK)).mean(-2) for t in (query, key)]
    share = torch.softmax(means[0] @ means[1].transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1)
    values, places = share.sort(-1)
    kept = values.cumsum(-1) >= 1 - SHARE
    return kept.gather(-1, places.argsort(-1))


def nabla(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, chosen_by: torch.Tensor | None = None
) -> torch.Tensor:
    keep = chosen(query if chosen_by is None else chosen_by, key).int()
    count = keep.sum(-1).to(torch.int32)
    order = keep.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    none = torch.zeros_like(count)

    def is_chosen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return keep[batch, head, query // BLOCK, key // BLOCK] > 0

    mask = BlockMask.from_kv_blocks(none, order, count, order, BLOCK_SIZE=BLOCK, mask_mod=is_chosen)
    return flex_attention(query, key, value, block_mask=mask)


def nabla_math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    keep = chosen(query.float(), key.float()).repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=keep)


CASES = [
    Case(OP, attend()),
    Case(OP, attend(), way="self", keys=QUERIES),
    Case(OP, attend(block_mask=CAUSAL), way="causal", keys=QUERIES, mask=causal),
    Case(OP, attend(enable_gqa=True), way="grouped", heads=4, kv_heads=2),
    # In half precision torch's selective checkpointing raises: it counts the ops of the trace that flex_attention makes
    # of a score_mod, which is another one when it was made before.
    Case(OP, attend(score_mod=nearer_is_better), way="score_mod", mask=distance, dtypes=(torch.float32,)),
    Case(OP, attend(), way="frozen", differentiable=False),
    # In half precision the reference, which knows no rounding, chooses other blocks.
    Case(
        OP,
        nabla,
        way="nabla",
        queries=BLOCKS * BLOCK,
        keys=BLOCKS * BLOCK,
        reference=nabla_math,
        dtypes=(torch.float32,),
    ),
]


class TestParity(Parity):
    cases = CASES
    test_flops = None  # type: ignore[assignment]  # torch's counter fails on it: see tests/test_flops.py
    rows = ROWS[:1]  # the other, of compiled code: tests/backends/test_compiled_flex.py


def inputs(dtype: torch.dtype = torch.float32, tokens: int = QUERIES, heads: int = 2) -> support.Tensors:
    generator = torch.Generator().manual_seed(0)
    names = ("query", "key", "value")
    return {n: torch.randn(2, heads, tokens, 8, generator=generator).to(dtype).requires_grad_() for n in names}


def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.tanh(flex_attention(torch.tanh(query), torch.tanh(key), torch.tanh(value), **options))


def test_score_mod_in_half_precision(attention_executions: Counter[str]) -> None:
    scored = functools.partial(region, score_mod=nearer_is_better)
    tensors = inputs(torch.bfloat16)
    reference = train_step(scored, tensors)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, scored), tensors), reference)
        assert attention_executions == {OP: 1}


@pytest.mark.xfail(strict=True, reason="torch 2.13: a saved tensor comes back from recompute without requires_grad")
def test_a_bias_that_trains_in_a_score_mod() -> None:
    """Its gradient is memory that nobody wrote, under torch's own checkpointing and so under every policy."""
    tensors = inputs() | {"bias": torch.randn(QUERIES, QUERIES).requires_grad_()}

    def biased(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias = torch.tanh(bias)
        return region(query, key, value, score_mod=lambda score, b, h, q, k: score + bias[q, k])

    reference = train_step(biased, tensors)
    assert_same(train_step(functools.partial(support.run_checkpointed, biased, policy="torch"), tensors), reference)


def test_outside_regions_and_without_gradients(attention_executions: Counter[str]) -> None:
    """Where nothing is saved the op just runs, once."""
    assert OP in interception.intercepted()
    tensors = inputs()
    with torch.no_grad():
        plain = region(**tensors)
        checkpointed = fastac.checkpoint(region, **tensors)
    assert torch.equal(plain, checkpointed)
    assert torch.equal(plain, region(**tensors))
    assert attention_executions == {OP: 3}
    assert thread.scope is None


def test_two_calls_and_two_backwards(attention_executions: Counter[str]) -> None:
    """Each call gets its own outputs back, and a second time with retain_graph."""

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return region(region(query, key, value, block_mask=CAUSAL), key, value)

    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    tensors = inputs()
    reference = train_step(twice, tensors, backward=backward)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, twice), tensors, backward=backward), reference)
    assert attention_executions == {OP: 2}


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_the_chosen_blocks_are_those_of_the_forward(engine: str, attention_executions: Counter[str]) -> None:
    """Scores that come out otherwise in recompute must not choose other keys than the saved output is made of."""
    noise = torch.Generator().manual_seed(5)

    def noisy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = torch.tanh(query)
        disturbed = query.detach() + torch.randn(query.shape, generator=noise)  # another one with each run
        return torch.tanh(nabla(query, key, value, 0.0, chosen_by=disturbed))

    tensors = inputs(tokens=BLOCKS * BLOCK)
    reference = train_step(noisy, tensors)
    noise.manual_seed(5)
    assert_same(train_step(functools.partial(fastac.checkpoint, noisy, engine=engine), tensors), reference)
    noise.manual_seed(5)
    again = train_step(functools.partial(fastac.checkpoint, noisy, policy="full", engine=engine), tensors)
    with pytest.raises(AssertionError):
        assert_same(again, reference)


def test_nabla_of_diffusers(attention_executions: Counter[str]) -> None:
    """Kandinsky's own choice of blocks, which changes what it sorted in place."""
    from diffusers.models.transformers.transformer_kandinsky import nablaT_v2

    blocks = 3
    window = torch.eye(blocks).bool()

    def kandinsky(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = torch.tanh(query), torch.tanh(key)
        mask = nablaT_v2(query.transpose(1, 2), key.transpose(1, 2), window, thr=SHARE)
        return torch.tanh(flex_attention(query, key, value, block_mask=mask))

    tensors = inputs(tokens=blocks * 64)
    reference = train_step(kandinsky, tensors)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, kandinsky), tensors), reference)
        assert attention_executions == {OP: 1}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return region(query * self.scale, key, value)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_in_compiled_blocks(where: str, attention_executions: Counter[str]) -> None:
    """The higher-order op stays a call in a compiled graph, where its output is saved from the first step on."""
    torch.manual_seed(0)
    block, tensors = Block(), inputs()
    reference = train_step(block, tensors)
    torch.compiler.reset()
    if where == "inside":  # checkpointing around compiled code
        run = functools.partial(fastac.checkpoint, torch.compile(block, backend="aot_eager"))
    else:
        run = torch.compile(lambda **given: fastac.checkpoint(block, **given), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        block.zero_grad()
        attention_executions.clear()
        found = train_step(run, tensors)
        assert_same(found, {name: value for name, value in reference.items() if "scale" not in name})
        assert attention_executions == {OP: 1}
