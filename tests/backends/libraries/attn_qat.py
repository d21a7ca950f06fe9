"""Attention with quantization-aware training, of fastvideo-kernel: an autograd.Function over Triton, no op.

The real Triton kernels, interpreted; with quantization they calculate through numbers of 4 bits. Not run: warp
specialization and the kernels for Blackwell, which a GPU must choose. Both stand behind the same Function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("attn_qat")

from tests.backends import triton_on_cpu

triton_on_cpu.takes_for_cuda("fastvideo_kernel")

from fastvideo_kernel.triton_kernels import attn_qat_train

from fastac.engine import interception
from fastac.backends import fastvideo
from tests.backends.kept import kept_of
from tests.backends.parity import Case, Parity, causal

OP = "fastac_opaque::fastvideo_kernel_triton_kernels_attn_qat_train__attention"
LAUNCHES = "attn_qat_train._attn_fwd"
HEADS, QUERIES, KEYS, DIM = 1, 64, 96, 32

triton_on_cpu.count_launches(attn_qat_train, "_attn_fwd", LAUNCHES)
interception.install()  # as fastac.enable does


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, causal: bool = False, **options: bool
) -> torch.Tensor:
    settings = {
        "use_qat_qkv_backward": True,
        "smooth_k": False,
        "warp_specialize": False,
        "IS_QAT": True,
        "two_level_quant_P": False,
        "fake_quant_P": True,
        "use_high_prec_o": False,
        "smooth_q": False,
        "use_global_sf_P": False,
        "use_global_sf_QKV": True,
    } | options
    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    found: torch.Tensor = attn_qat_train.attention(*tensors, causal, DIM**-0.5, *settings.values())
    return found


plain = functools.partial(attend, IS_QAT=False, fake_quant_P=False)


def case(way: str, call: Callable[..., torch.Tensor], **options: Any) -> Case:
    shape = {"batch": 1, "heads": HEADS, "queries": QUERIES, "keys": KEYS, "dim": DIM} | options
    # Its kernels take bfloat16. What 4 bits leave is far from exact: that it is attention is seen without them.
    exact = {torch.bfloat16: 3e-2 if call.keywords.get("IS_QAT") is False else 0.6}
    return Case(
        OP, call, way, kernel=LAUNCHES, dtypes=(torch.bfloat16,), tolerances=exact, counts_backward=False, **shape
    )


CASES = [
    case("not quantized", plain),
    case("not quantized, smooth keys", functools.partial(plain, smooth_k=True)),
    case("not quantized, causal", functools.partial(plain, causal=True), queries=KEYS, mask=causal),
    case("quantized", functools.partial(attend)),
    case("quantized in two levels, smooth keys", functools.partial(attend, smooth_k=True, two_level_quant_P=True)),
    # Its backward is another kernel where there are as many queries as keys.
    case("quantized, precise output", functools.partial(attend, use_high_prec_o=True), queries=KEYS),
]


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "attn_qat")


@pytest.mark.parametrize(
    ("way", "quantized", "precise"),
    [("not quantized", False, False), ("quantized", True, False), ("quantized, precise output", True, True)],
)
def test_what_is_kept(way: str, quantized: bool, precise: bool) -> None:
    """Beyond the output: statistics, and what quantization made of query, key and value, and a more precise output."""
    case = next(case for case in CASES if case.way == way)
    held, extra = kept_of(case, dtype=torch.bfloat16)
    output = HEADS * case.queries * DIM * 2
    statistics = HEADS * case.queries * 4
    assert extra == statistics + quantized * (output + 2 * HEADS * KEYS * DIM * 2) + precise * output
    assert 0 < held - extra - output < 256, "a few numbers beside the tensors"
