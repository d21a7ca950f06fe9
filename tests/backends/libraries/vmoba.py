"""VMoBA of fastvideo-kernel: attention to chosen chunks, by two calls of flash-attn 2's op in one autograd.Function."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("vmoba")

import tests.backends.triton_on_cpu  # noqa: F401 the package imports its Triton kernels
from tests.backends import flash_on_cpu

flash_on_cpu.flash_attn_2()

from fastvideo_kernel import moba_attn_varlen

from tests.backends.parity import Case, Parity, ends
from tests.backends.sparse import assert_choice_is_kept

LENGTHS = (40, 24)
CHUNK = 16
TOP = 2


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, mode: str) -> Any:
    chunks = ends(LENGTHS), max(LENGTHS), CHUNK, TOP, mode
    return moba_attn_varlen(query, key, value, *chunks, simsum_threshold=0.4, threshold_type="query_head")


class TestVMoBA(Parity):
    """The rows are those of flash-attn 2."""

    cases = tuple(
        Case(
            "flash_attn::_flash_attn_varlen_forward",
            functools.partial(attend, mode=mode),
            mode,
            packed=True,
            query_lengths=LENGTHS,
            key_lengths=LENGTHS,
            seen=(max(LENGTHS), CHUNK),
            sparse=True,
            without_flops="how many pairs there are depends on its choice",
        )
        for mode in ("topk", "threshold")
    )


def turned(scores: torch.Tensor, sign: int) -> torch.Tensor:
    """But for the own chunk, which comes first, and those of other sequences."""
    return torch.where(scores.abs() < 1e8, scores * sign, scores)


@pytest.mark.parametrize(("case", "chooser"), list(zip(TestVMoBA.cases, ("topk", "sort"), strict=True)))
def test_recompute_keeps_the_chosen_chunks(case: Case, chooser: str) -> None:
    assert_choice_is_kept(case, (torch, chooser), turned)
