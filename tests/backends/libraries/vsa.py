"""vsa 0.0.4, the first release of video sparse attention: its real Triton kernels, and its op for the H100's extension.

The extension is substituted by plain math.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("vsa")

import tests.backends.triton_on_cpu  # noqa: F401 Triton's interpreter
from tests.backends import flash_on_cpu, sparse

vars(flash_on_cpu.substitute("vsa_cuda")).update(
    block_sparse_fwd=sparse.block_sparse_fwd, block_sparse_bwd=sparse.block_sparse_bwd
)
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    import vsa

from vsa import block_sparse_wrapper as wrapper

from fastac.backends import fastvideo
from tests.backends.parity import Parity
from tests.backends.sparse import BLOCK, BLOCKS, TOKENS, TOP, run_on_cpu

SIZES = torch.full((BLOCKS,), BLOCK, dtype=torch.int32)
"""Keys that count in each block: all. With fewer in one the gradients of the queries are wrong in this release, whose
kernel looks the number up by a block's place among the chosen ones. fastvideo-kernel, its successor, is right."""

run_on_cpu(wrapper.block_sparse_attn_triton, counts=True)
run_on_cpu(wrapper.block_sparse_attn_backward_triton)
run_on_cpu(wrapper.block_sparse_attn_SM90, counts=True)
run_on_cpu(wrapper.block_sparse_attn_backward_SM90)


def video(op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vsa, "block_sparse_attn", op)  # the one it takes on this GPU
        return vsa.video_sparse_attn(query, key, value, SIZES, TOP, 4)


class TestVsa(Parity):
    cases = tuple(
        sparse.case(
            op._qualname,
            functools.partial(video, op),
            pairs=2 * TOKENS * TOP * BLOCK,
            dtype=torch.bfloat16,  # its kernels take nothing else
            chooser=(torch, "topk"),
        )
        for op in (wrapper.block_sparse_attn_triton, wrapper.block_sparse_attn_SM90)
    )
    rows = tuple(row for row in fastvideo.ROWS if row.namespace == "vsa")
