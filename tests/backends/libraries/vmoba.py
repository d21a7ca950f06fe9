"""VMoBA of fastvideo-kernel: attention to chosen chunks, by two calls of flash-attn 2's op in one autograd.Function."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.backends import packages

packages.use("vmoba")

import tests.backends.triton_on_cpu  # noqa: F401 the package imports its Triton kernels
from tests.backends import flash_on_cpu

flash_on_cpu.flash_attn_2()

from fastvideo_kernel import moba_attn_varlen

from tests.backends.parity import Case, Parity, ends

LENGTHS = (40, 24)
CHUNK = 16
TOP = 2


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, mode: str) -> Any:
    chunks = ends(LENGTHS), max(LENGTHS), CHUNK, TOP, mode
    return moba_attn_varlen(query, key, value, *chunks, simsum_threshold=0.4, threshold_type="query_head")


def turned(scores: torch.Tensor, sign: int) -> torch.Tensor:
    """But for the own chunk, which comes first, and those of other sequences."""
    return torch.where(scores.abs() < 1e8, scores * sign, scores)


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
            without_flops="how many pairs there are depends on its choice",
            chooser=(torch, chooser),
            turned=turned,
        )
        for mode, chooser in (("topk", "topk"), ("threshold", "sort"))
    )
