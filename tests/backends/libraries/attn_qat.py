"""Attention with quantization-aware training, of fastvideo-kernel: an autograd.Function over Triton, no op.

The real Triton kernels, interpreted. Not run: warp specialization and the kernels for Blackwell.
"""

from __future__ import annotations

import inspect
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


ON = ("use_qat_qkv_backward", "smooth_k", "IS_QAT", "fake_quant_P", "use_high_prec_o", "use_global_sf_QKV")
OFF = ("warp_specialize", "two_level_quant_P", "smooth_q", "use_global_sf_P")


@contiguous
def attend(*args: Any) -> Any:
    names = list(inspect.signature(attn_qat_train._attention.forward).parameters)
    settings = [name in ON for name in names if name in ON + OFF]
    return attn_qat_train.attention(*args[:3], False, args[0].shape[-1] ** -0.5, *settings)


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
