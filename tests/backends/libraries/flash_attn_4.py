"""flash-attn 4 (CuTe), and the block-sparse attention of fastvideo-kernel that runs on it. No op shows either.

Both are made visible once their module is loaded. The Python layers are the real ones, their kernels substituted.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("flash_attn_4")

from tests.backends import flash_4_on_cpu, triton_on_cpu

triton_on_cpu.takes_for_cuda("fastvideo_kernel")
interface = flash_4_on_cpu.flash_attn_4()
apply = interface.FlashAttnFunc.apply  # taken before fastac was imported

import fastvideo_kernel.block_sparse_attn_cute_fwd as cute
from fastvideo_kernel import block_sparse_attn_256

from fastac.backends import fastvideo, flash_attn_4
from tests.backends.parity import KEY_LENGTHS, LENGTHS, Case, Parity, swapped

dense = swapped(lambda q, k, v, _: interface.flash_attn_func(q, k, v)[0])


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, of: int) -> Any:
    """of: how many of the lengths are passed. The first two do not say the longest."""
    return interface.flash_attn_varlen_func(query, key, value, **dict(list(LENGTHS.items())[:of]))[0]


BLOCK = 128
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]], dtype=torch.bool)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend."""


def sparse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    sizes = torch.tensor([BLOCK, BLOCK, BLOCK - 40], dtype=torch.int32)  # not all keys of the last block count
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTVIDEO_VSA_CUTEDSL", "1")
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        found: torch.Tensor = block_sparse_attn_256.block_sparse_attn_128(query, key, value, MAP, sizes)[0]
    return found


case = functools.partial(Case, "", kernel=flash_4_on_cpu.KERNEL, counts_backward=False)
varlen = functools.partial(case, function=interface.FlashAttnVarlenFunc, packed=True)


class TestFlashAttn4(Parity):
    cases = (
        case(dense, function=interface.FlashAttnFunc, kv_heads=1),
        case(swapped(lambda q, k, v, _: apply(q, k, v)[0]), "captured", function=interface.FlashAttnFunc),
        varlen(functools.partial(packed, of=4)),
        varlen(functools.partial(packed, of=2), "unknown", seen=(sum(KEY_LENGTHS),)),  # so many there are in all
        case(
            sparse,
            function=cute._CuteAttentionQ128,
            batch=1,
            queries=2 * BLOCK,
            keys=3 * BLOCK,
            pairs=7 * BLOCK**2,
        ),
    )
    rows = (*flash_attn_4.FUNCTIONS, *(row for row in fastvideo.FUNCTIONS if row.backend == "vsa"))
