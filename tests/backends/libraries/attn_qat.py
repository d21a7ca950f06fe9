"""Attention with quantization-aware training, of fastvideo-kernel: an autograd.Function over Triton, no op.

The real Triton kernels, interpreted. Not run: warp specialization and the kernels for Blackwell.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.backends import packages

packages.use("attn_qat")

from tests.backends import triton_on_cpu

triton_on_cpu.takes_for_cuda("fastvideo_kernel")

from fastvideo_kernel.triton_kernels import attn_qat_train

from fastac.backends import fastvideo
from tests.backends.parity import Case, Parity, contiguous

LAUNCHES = "attn_qat_train._attn_fwd"
triton_on_cpu.count_launches(attn_qat_train, "_attn_fwd", LAUNCHES)


SETTINGS = {
    "use_qat_qkv_backward": True,
    "smooth_k": True,
    "warp_specialize": False,
    "IS_QAT": True,
    "two_level_quant_P": False,
    "fake_quant_P": True,
    "use_high_prec_o": True,
    "smooth_q": False,
    "use_global_sf_P": False,
    "use_global_sf_QKV": True,
}


@contiguous
def attend(*args: Any) -> Any:
    return attn_qat_train.attention(*args[:3], False, args[0].shape[-1] ** -0.5, *SETTINGS.values())


class TestAttnQat(Parity):
    cases = (
        Case(
            "",
            attend,
            function=attn_qat_train._attention,
            kernel=LAUNCHES,
            batch=1,
            heads=1,
            queries=64,
            keys=64,
            dim=32,
            counts_backward=False,
            dtype=torch.bfloat16,  # its kernels take nothing else
        ),
    )
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "attn_qat")
