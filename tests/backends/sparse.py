"""What the tests of sparse attention share: references, and choices of blocks that recompute would make otherwise."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

import fastac
from tests import support
from tests.backends.parity import Case
from tests.support import assert_same, train_step


def run_on_cpu(op: Any, counts: bool = False) -> None:
    """Let a library's custom op, registered for CUDA alone, run its own Python code on the CPU.

    counts: each run, in `support.executions`, by the name of the op.
    """
    implementation = op._init_fn

    def kernel(*args: Any) -> Any:
        if counts:
            support.executions[op._qualname] += 1
        return implementation(*args)

    op.register_kernel("cpu")(kernel)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention over (batch, heads, sequence, dim). mask: which pairs attend."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def map_of(index: torch.Tensor, number: torch.Tensor, width: int) -> torch.Tensor:
    """Which of so many blocks are in each list of them. index: (..., longest), of which the first `number` count."""
    counts = torch.arange(index.shape[-1]) < number[..., None]
    found = torch.zeros(*number.shape, width + 1, dtype=torch.bool)  # what does not count goes into one more
    return found.scatter_(-1, torch.where(counts, index.long(), width), True)[..., :width]


def mask_of(blocks: torch.Tensor, size: int, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Which tokens attend, where blocks of so many tokens do. counts: the keys that count in each block, the first."""
    mask = blocks.bool().repeat_interleave(size, -2).repeat_interleave(size, -1)
    return mask if counts is None else mask & (torch.arange(size) < counts[:, None]).flatten()


def means(tensor: torch.Tensor, size: int, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Of blocks of so many tokens. counts: to divide by, where it is not that many."""
    sums = tensor.unflatten(2, (-1, size)).sum(3)
    return sums / (size if counts is None else counts[:, None])


def nearest(queries: torch.Tensor, keys: torch.Tensor, number: int) -> torch.Tensor:
    """Which blocks are chosen: for each query so many keys, by their products."""
    scores = (queries @ keys.transpose(-1, -2)).detach()
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(number).indices, True)


def video_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    size: int,
    number: int,
    query_counts: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """VSA: attention between the means of blocks, plus attention to the blocks that matter most to each."""
    coarse = means(query, size, query_counts), means(key, size, counts), means(value, size, counts)
    output = attention(*coarse, torch.ones((), dtype=torch.bool)).repeat_interleave(size, 2)
    return output + attention(query, key, value, mask_of(nearest(*coarse[:2], number), size, counts))


def _times(scores: torch.Tensor, sign: int) -> torch.Tensor:
    return scores * sign


def assert_choice_is_kept(
    case: Case,
    engine: str,
    chooser: tuple[Any, str],
    turn: Callable[[torch.Tensor, int], torch.Tensor] = _times,
) -> None:
    """Gradients are right although recompute would choose the other way around.

    chooser: whose function of that name chooses; its first argument is turned, by the sign -1, at every second call.
    """
    region, inputs = case.region, case.inputs(case.dtypes[0])
    reference = train_step(region, inputs)
    choose, calls = getattr(*chooser), Counter[str]()

    def choose_otherwise(scores: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls["choices"] += 1
        return choose(turn(scores, 1 if calls["choices"] % 2 else -1), *args, **options)

    def step(**options: str) -> support.Tensors:
        calls.clear()
        return train_step(functools.partial(fastac.checkpoint, region, **options), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*chooser, choose_otherwise)
        try:
            full = step(policy="full")
        except CheckpointError:
            pass  # another choice of another size
        else:
            assert any(not torch.equal(full[name], reference[name]) for name in reference), "no matter what it chooses"
        for _ in range(2):
            assert_same(step(engine=engine), reference)
