"""LongCat's block-sparse attention (BSA), as FastVideo 0.2.1 carries it: an autograd.Function over Triton, no op.

It chooses its blocks inside the Function, by functions under torch.compile. The Triton kernels are the real ones,
interpreted; what is compiled runs eagerly, but for one test.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("longcat")
sys.path[:0] = [str(Path(path, "fastvideo", "third_party")) for path in sys.path if Path(path, "fastvideo").is_dir()]

from tests.backends import triton_on_cpu

triton_on_cpu.takes_for_cuda("longcat_video")

from longcat_video.block_sparse_attention import bsa_interface

import fastac
from fastac.engine import interception
from fastac.backends import fastvideo
from tests.backends.kept import kept_of
from tests.backends.parity import Case, Parity
from tests.backends.sparse import assert_choice_is_kept, attention, mask_of, means, nearest
from tests.support import assert_same, train_step

OP = "fastac_opaque::longcat_video_block_sparse_attention_bsa_interface__attention_bsa"
LAUNCHES = "bsa_interface._attn_fwd_bsa_varlen_align"
BLOCK, BLOCKS = 64, 4
TOKENS = BLOCK * BLOCKS
HEADS, DIM = 2, 16
TOP = 2

triton_on_cpu.count_launches(bsa_interface, "_attn_fwd_bsa_varlen_align", LAUNCHES)
interception.install()  # as fastac.enable does


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: float = 0.0,
    sparsity: float | None = 1 - TOP / BLOCKS,
    threshold: float | None = None,
) -> torch.Tensor:
    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    arguments = (BLOCK, BLOCK, sparsity, threshold, DIM**-0.5)
    return bsa_interface.flash_attn_bsa(*tensors, *arguments)  # type: ignore[no-any-return]


def video(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    """Through its entry point, for a video of 2 x 8 x 16 in blocks of 2 x 4 x 8."""
    found: torch.Tensor = bsa_interface.flash_attn_bsa_3d(
        query, key, value, (2, 8, 16), (2, 8, 16), 1 - TOP / BLOCKS, None, [2, 4, 8], [2, 4, 8]
    )
    return found


def in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(2, (2, 2, 4, 2, 8)).permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(2, 6)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(2, (2, 2, 2, 4, 8)).permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(2, 6)


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attention(query, key, value, mask_of(nearest(means(query, BLOCK), means(key, BLOCK), TOP), BLOCK))


def video_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return in_order(reference(*map(in_blocks, (query, key, value))))


def case(way: str, call: Callable[..., torch.Tensor], expected: Any, **options: Any) -> Case:
    # It chooses inside the Function: counted as if it were dense.
    shape: dict[str, Any] = {"batch": 1, "queries": TOKENS, "keys": TOKENS, "dim": DIM}
    return Case(OP, call, way, kernel=LAUNCHES, reference=expected, counts_backward=False, **shape, **options)


CASES = [
    case("most alike", attend, reference),
    case(
        "threshold",
        functools.partial(attend, sparsity=None, threshold=0.6),
        None,
        without_reference="its backward takes keys and values of all blocks for chosen ones, with a threshold",
    ),
    case("video", video, video_reference),
]


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "bsa")


def test_what_is_kept() -> None:
    """Beyond the output: statistics, and the chosen blocks with their number."""
    held, extra = kept_of(CASES[0])
    queries = HEADS * BLOCKS
    assert extra == HEADS * TOKENS * 4 + queries * TOP * 8 + queries * 4
    assert 0 < held - extra - HEADS * TOKENS * DIM * 4 < 256, "a few numbers beside the tensors"


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.way)
def test_recompute_keeps_the_chosen_blocks(case: Case, engine: str) -> None:
    """The choice is made inside the Function, whose forward does not run again."""
    assert_choice_is_kept(case, engine, (bsa_interface, "cal_score"))


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_what_it_compiles_is_compiled(engine: str, attention_executions: Counter[str]) -> None:
    """Dynamo traces the choice of blocks while the Function runs inside an open region; also in the first step."""
    torch._dynamo.reset()
    region, inputs = CASES[0].region, CASES[0].inputs()
    with torch.compiler.set_stance("default"):
        expected = train_step(region, inputs)
        for again in (1, 0):  # compiled code can not be watched: a region that calls some is run once more, eagerly
            attention_executions.clear()
            found = train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs)
            assert attention_executions == {LAUNCHES: 1 + again}
            assert_same(found, expected)
