"""VMoBA of fastvideo-kernel: attention to chosen chunks, by two calls of flash-attn 2's op in one autograd.Function."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("vmoba")

import tests.backends.triton_on_cpu  # noqa: F401 the package imports its Triton kernels
from tests.backends import flash_on_cpu, without_selection

flash_on_cpu.flash_attn_2()

from fastvideo_kernel import moba_attn_varlen

from tests.backends.parity import Case, Parity, ends
from tests.backends.sparse import assert_choice_is_kept

OP = "flash_attn::_flash_attn_varlen_forward"
LENGTHS = (40, 24)
CHUNK = 16
TOP = 2


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, mode: str = "topk", kind: str = "query_head"
) -> torch.Tensor:
    found: torch.Tensor = moba_attn_varlen(
        query, key, value, ends(LENGTHS), max(LENGTHS), CHUNK, TOP, mode, simsum_threshold=0.4, threshold_type=kind
    )
    return found


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Each query of each head attends to its own chunk, and to the chunk of its sequence whose mean is nearest."""
    return torch.cat([_of_one(*part) for part in zip(*(t.split(LENGTHS) for t in (query, key, value)), strict=True)])


def _of_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    attended = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    probabilities = attended.masked_fill(~_pairs_of_one(query, key), float("-inf")).softmax(-1)
    return (probabilities @ value).transpose(0, 1)


def _pairs_of_one(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which queries, of each head, attend to which keys."""
    chunks = torch.arange(key.shape[1]) // CHUNK
    means = torch.stack([key[:, chunks == chunk].mean(1) for chunk in chunks.unique()], 1)
    own = torch.nn.functional.one_hot(chunks, len(chunks.unique()))
    scores = (query @ means.transpose(-1, -2)).detach() + own * 1e9
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(TOP).indices, True)
    return chosen[..., chunks]


def with_pairs(case: Case) -> Case:
    """The case with how many pairs of a query and a key its choice makes."""
    query, key, _ = (tensor.detach().tanh() for tensor in case.inputs().values())
    parts = [(t.transpose(0, 1) for t in part) for part in zip(query.split(LENGTHS), key.split(LENGTHS), strict=True)]
    return dataclasses.replace(case, pairs=sum(int(_pairs_of_one(*part).sum()) for part in parts))


def case(mode: str, kind: str, **options: Any) -> Case:
    return Case(
        OP,
        functools.partial(attend, mode=mode, kind=kind),
        f"{mode}, {kind}",
        packed=True,
        query_lengths=LENGTHS,
        key_lengths=LENGTHS,
        seen=(max(LENGTHS), CHUNK),
        **options,
    )


_OWN = {
    "without_reference": "a choice of its own, and the same attention after it",
    "without_flops": "how many pairs there are depends on its choice",
}
CASES = [
    with_pairs(case("topk", "query_head", reference=reference)),
    case("topk", "overall", **_OWN),
    case("topk", "head_global", **_OWN),
    case("threshold", "query_head", **_OWN),
    case("threshold", "block", **_OWN),
    case("threshold", "overall", **_OWN),
    case("threshold", "head_global", **_OWN),
]


class TestParity(Parity):
    """The rows are those of flash-attn 2."""

    cases = CASES


CHOOSES_BY = {"topk": "topk", "threshold": "sort"}


def turned(scores: torch.Tensor, sign: int) -> torch.Tensor:
    """But for the own chunk, which comes first, and those of other sequences."""
    return torch.where(scores.abs() < 1e8, scores * sign, scores)


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.way)
def test_recompute_keeps_the_chosen_chunks(case: Case, engine: str) -> None:
    assert_choice_is_kept(case, engine, (torch, CHOOSES_BY[case.way.partition(",")[0]]), turned)


def test_without_the_rows_of_selection_it_would_not() -> None:
    without_selection.assert_fails(__file__, "test_recompute_keeps_the_chosen_chunks[topk, query_head-tape]")
