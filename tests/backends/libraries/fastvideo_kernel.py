"""fastvideo-kernel 0.3.5: video sparse attention (VSA), by its Triton kernels and through its CUDA extensions' ops.

The Triton kernels are the real ones, interpreted. The extensions (sm90, sm100a) are substituted by plain math.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.backends import packages

packages.use("fastvideo_kernel")

from tests.backends import flash_on_cpu, triton_on_cpu

functions = SimpleNamespace()
flash_on_cpu.substitute("fastvideo_kernel._C").fastvideo_kernel_ops = functions
triton_on_cpu.takes_for_cuda("fastvideo_kernel")

from fastvideo_kernel import ops, video_sparse_attn
from fastvideo_kernel.triton_kernels import block_sparse_attn_triton as kernels

from fastac.backends import fastvideo
from tests.backends.parity import Parity
from tests.backends.sparse import BLOCK, BLOCKS, TOKENS, TOP, block_sparse_bwd, block_sparse_fwd, run_on_cpu
from tests.backends.sparse import case as sparse_case

# The module of this name is hidden behind the function of this name.
block_sparse = sys.modules["fastvideo_kernel.block_sparse_attn"]

SIZES = torch.tensor([64, 40, 64], dtype=torch.int32)
"""Keys that count in each block: the last ones of a block may be padding."""

MAP = torch.tensor([[[[1, 0, 1], [0, 1, 0], [1, 1, 0]], [[1, 1, 1], [0, 1, 1], [1, 0, 0]]]], dtype=torch.bool)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend."""

NUMBER = MAP.sum(-1).int()
INDEX = torch.where(torch.arange(BLOCKS) < NUMBER[..., None], MAP.int().argsort(-1, descending=True), -1).int()

triton_on_cpu.count_in_tensors(kernels)


def block_sparse_sm100a_fwd(q: Any, k: Any, v: Any, _: None, index: Any, number: Any, sizes: Any, *others: Any) -> Any:
    output, statistics = block_sparse_fwd(q, k, v, index, number, sizes)
    return output, statistics[..., 0] / math.log(2)  # for the Triton kernel of its backward


functions.block_sparse_fwd, functions.block_sparse_bwd = block_sparse_fwd, block_sparse_bwd
functions.block_sparse_sm100a_fwd = block_sparse_sm100a_fwd
sm100a = importlib.import_module("fastvideo_kernel.block_sparse_attn_sm100a")  # looks for it at its import

for _op in (
    block_sparse.block_sparse_attn_triton,
    block_sparse.block_sparse_attn_sm90,
    block_sparse.block_sparse_attn_sm100a_op,
    sm100a._block_sparse_attn_sm100a_inference,
    sm100a._block_sparse_attn_sm100a_from_mask_inference,
):
    run_on_cpu(_op, counts=True)
run_on_cpu(block_sparse.block_sparse_attn_backward_triton)
run_on_cpu(block_sparse.block_sparse_attn_backward_sm90)


def from_indices(op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    return op(query, key, value, INDEX, NUMBER, SIZES)[0]


def video(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    return video_sparse_attn(query, key, value, SIZES, SIZES, TOP, (1, 1, BLOCK))


def block_sparse_attn_sm100a_inference(*tensors: torch.Tensor) -> Any:
    return sm100a.block_sparse_attn_sm100a(*tensors, INDEX, NUMBER, SIZES, need_lse=False)[0]


def block_sparse_attn_sm100a_from_mask_inference(*tensors: torch.Tensor) -> Any:
    return sm100a.block_sparse_attn_sm100a_from_mask(*tensors, MAP, SIZES)[0]


case = functools.partial(sparse_case, pairs=11 * BLOCK**2, dtype=torch.bfloat16)  # its kernels take nothing else


class TestFastVideoKernel(Parity):
    cases = (
        # Its blocks are chosen by a kernel that no op shows: the op that gets them has them among its arguments.
        case(
            "fastvideo_kernel::block_sparse_attn_triton",
            video,
            "video_sparse_attn",
            heads=1,
            pairs=TOKENS * TOP * BLOCK,
            chooser=(ops, "fused_topk_mask"),
        ),
        *(
            case(op._qualname, functools.partial(from_indices, op), "from indices")
            for op in (
                block_sparse.block_sparse_attn_triton,
                block_sparse.block_sparse_attn_sm90,
                block_sparse.block_sparse_attn_sm100a_op,
            )
        ),
    )
    rows = tuple(row for row in fastvideo.ROWS if row.namespace == "fastvideo_kernel")
    refused = (block_sparse_attn_sm100a_inference, block_sparse_attn_sm100a_from_mask_inference)
