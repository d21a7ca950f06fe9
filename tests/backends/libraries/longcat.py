"""LongCat's block-sparse attention (BSA), as FastVideo 0.2.1 carries it: an autograd.Function over Triton, no op.

It chooses its blocks inside the Function, by functions under torch.compile. The Triton kernels are the real ones,
interpreted; what is compiled runs eagerly, but for one test.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
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
    _patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    from longcat_video.block_sparse_attention import bsa_interface

import fastac
from fastac.backends import fastvideo
from tests.backends.parity import Case, Parity
from tests.support import assert_region, assert_same, train_step

LAUNCHES = "bsa_interface._attn_fwd_bsa_varlen_align"
BLOCK, BLOCKS, TOP = 64, 4, 2
triton_on_cpu.count_launches(bsa_interface, "_attn_fwd_bsa_varlen_align", LAUNCHES)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    return bsa_interface.flash_attn_bsa(*tensors, BLOCK, BLOCK, 1 - TOP / BLOCKS, None, query.shape[-1] ** -0.5)


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


def test_what_it_compiles_is_compiled(attention_executions: Counter[str]) -> None:
    """Dynamo traces the choice of blocks while the Function runs inside an open region; also in the first step."""
    torch.compiler.reset()
    case = TestLongCat.cases[0]
    with torch.compiler.set_stance("default"):
        first = train_step(functools.partial(fastac.checkpoint, case.region), case.inputs())
        assert_same(first, train_step(case.region, case.inputs()))
        assert_region(case.region, case.inputs(), attention_executions)
