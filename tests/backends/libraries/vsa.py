"""vsa 0.0.4, the first release of video sparse attention: its real Triton kernels, and its op for the H100's extension.

On import it asks which GPU there is: an H100, so that it defines both its ops. The extension is a stand-in, with the
results of the Triton kernels.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("vsa")

import tests.backends.triton_on_cpu  # noqa: F401 Triton's interpreter

extension = sys.modules["vsa_cuda"] = ModuleType("vsa_cuda")
extension.block_sparse_fwd = extension.block_sparse_bwd = None  # type: ignore[attr-defined]
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    import vsa

from vsa import block_sparse_attn_triton as kernels
from vsa import block_sparse_wrapper as wrapper

from fastac.backends import fastvideo
from tests.backends import without_selection
from tests.backends.parity import Case, Parity
from tests.backends.sparse import assert_choice_is_kept, attention, map_of, mask_of, run_on_cpu, video_sparse_attention

BLOCK = 64
BLOCKS = 3
TOKENS = BLOCKS * BLOCK
TOP = 2
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 0], [1, 1, 0]], [[1, 1, 1], [0, 1, 1], [1, 0, 0]]]], dtype=torch.bool)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend."""

SIZES = torch.tensor([64, 64, 64], dtype=torch.int32)
"""Keys that count in each block: all. With fewer in one the gradients of the queries are wrong in this release, whose
kernel looks the number up by a block's place among the chosen ones. fastvideo-kernel, its successor, is right."""


run_on_cpu(wrapper.block_sparse_attn_triton, counts=True)
run_on_cpu(wrapper.block_sparse_attn_backward_triton)
run_on_cpu(wrapper.block_sparse_attn_SM90, counts=True)
run_on_cpu(wrapper.block_sparse_attn_backward_SM90)


def block_sparse_fwd(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output, statistics = kernels.triton_block_sparse_attn_forward(*arguments)
    return output, statistics[..., None]


def block_sparse_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    index: torch.Tensor,
    number: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Given the blocks of queries of each block of keys; in float32, as the extension has it."""
    of_queries = wrapper.map_to_index(map_of(index, number, BLOCKS).transpose(-1, -2))
    arguments = (grad, q, k, v, output, statistics[..., 0], *of_queries, index, number, sizes)
    return tuple(gradient.float() for gradient in kernels.triton_block_sparse_attn_backward(*arguments))


wrapper.block_sparse_fwd, wrapper.block_sparse_bwd = block_sparse_fwd, block_sparse_bwd


def video(op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vsa, "block_sparse_attn", op)  # the one it takes on this GPU
        return vsa.video_sparse_attn(query, key, value, SIZES, TOP, 4)  # type: ignore[no-any-return]


def cases(op: Any) -> list[Case]:
    # Kernels calculate in bfloat16 and take nothing else, and as many queries as keys.
    whole = functools.partial(video_sparse_attention, size=BLOCK, number=TOP, query_counts=SIZES, counts=SIZES)
    shape: dict[str, Any] = {"batch": 1, "queries": TOKENS, "keys": TOKENS, "dim": 16, "dtypes": (torch.bfloat16,)}
    return [
        Case(
            op._qualname,
            lambda q, k, v, _: op(q, k, v, MAP, SIZES)[0],
            reference=functools.partial(attention, mask=mask_of(MAP, BLOCK)),
            pairs=11 * BLOCK**2,
            **shape,
        ),
        Case(
            op._qualname,
            functools.partial(video, op),
            "video_sparse_attn",
            reference=whole,
            pairs=2 * TOKENS * TOP * BLOCK,
            **shape,
        ),
    ]


CASES = [*cases(wrapper.block_sparse_attn_triton), *cases(wrapper.block_sparse_attn_SM90)]


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.ROWS if row.namespace == "vsa")


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_recompute_keeps_the_chosen_blocks(engine: str) -> None:
    assert_choice_is_kept(CASES[1], engine, (torch, "topk"))


def test_without_the_rows_of_selection_it_would_not() -> None:
    without_selection.assert_fails(__file__, "test_recompute_keeps_the_chosen_blocks[tape]")
