"""LongCat's block-sparse attention (BSA), as FastVideo 0.2.1 carries it: an autograd.Function over Triton, no op.

It chooses its blocks inside the Function, by functions under torch.compile, which run eagerly here. The Triton kernels
are the real ones, interpreted.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("longcat")
sys.path[:0] = [str(packages.place("fastvideo") / Path("fastvideo", "third_party"))]

from tests.backends import triton_on_cpu

triton_on_cpu.takes_for_cuda("longcat_video")

with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", disable=True))
    from longcat_video.block_sparse_attention import bsa_interface

from fastac.backends import fastvideo
from tests.backends.parity import Case, Parity, contiguous

LAUNCHES = "bsa_interface._attn_fwd_bsa_varlen_align"
BLOCK, BLOCKS, TOP = 64, 4, 2
triton_on_cpu.count_launches(bsa_interface, "_attn_fwd_bsa_varlen_align", LAUNCHES)


@contiguous
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    sparsity = 1 - TOP / BLOCKS
    return bsa_interface.flash_attn_bsa(query, key, value, BLOCK, BLOCK, sparsity, None, query.shape[-1] ** -0.5)


class TestLongCat(Parity):
    cases = (
        Case(
            "",
            attend,
            function=bsa_interface._attention_bsa,
            kernel=LAUNCHES,
            batch=1,
            queries=BLOCK * BLOCKS,
            keys=BLOCK * BLOCKS,
            dim=16,
            counts_backward=False,
            # It chooses inside the Function: FLOPs are counted as if it were dense.
            chooser=(bsa_interface, "cal_score"),
        ),
    )
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "bsa")
