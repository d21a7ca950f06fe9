"""Every aten attention op of fastac/backends/sdpa.py, through torch's own autograd formulas.

Most of these ops have no CPU kernel; `aten_on_cpu` gives them one. On a GPU the real ones run (marker `gpu`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastac.backends import sdpa
from fastac.registry import find_op, present_ops
from tests import support
from tests.backends.aten_on_cpu import cpu_kernels as cpu_kernels
from tests.backends.parity import KEY_LENGTHS, KEYS, QUERIES, QUERY_LENGTHS, SWAPPED, Case, Parity, ends, swapped
from tests.support import assert_region

ENDS = ends(QUERY_LENGTHS), ends(KEY_LENGTHS)
LONGEST = max(QUERY_LENGTHS), max(KEY_LENGTHS)
DECOMPOSITION = "_safe_softmax"
DROPOUT = object()
"""Stands for the dropout of a call, among the arguments of an op."""


def case(op: str, *arguments: Any, by_tokens: bool = False, batched: bool = False, **options: Any) -> Case:
    """arguments: behind query, key and value. by_tokens: tokens before heads. batched: packed, in a batch of one."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
        heads = [one[None] if batched else one for one in (query, key, value)]
        found = find_op(f"aten::{op}")(*heads, *(dropout_p if one is DROPOUT else one for one in arguments))
        output: torch.Tensor = found[0]
        return output[0] if batched else output

    return Case(f"aten::{op}", swapped(call) if by_tokens else call, drops=DROPOUT in arguments, **options)


packed = functools.partial(case, packed=True, way="packed")
by_tokens = functools.partial(case, by_tokens=True, without_flops=SWAPPED)
without_backward = functools.partial(case, differentiable=False)
quantized = functools.partial(without_backward, packed=True)


class TestSdpa(Parity):
    cases = (
        case("_scaled_dot_product_flash_attention", DROPOUT),
        without_backward("_scaled_dot_product_flash_attention.quantized", None, None, None, 0.0),
        case("_scaled_dot_product_efficient_attention", None, True, DROPOUT),
        case("_scaled_dot_product_cudnn_attention", None, True, DROPOUT),
        case("_scaled_dot_product_fused_attention_overrideable", None, DROPOUT),
        case("_scaled_dot_product_flash_attention_for_cpu"),
        without_backward("_scaled_dot_product_attention_math_for_mps"),
        by_tokens("_flash_attention_forward", None, None, QUERIES, KEYS, 0.0, False, False),
        packed("_flash_attention_forward", *ENDS, *LONGEST, DROPOUT, False, False),
        quantized("_flash_attention_forward.quantized", *ENDS, *LONGEST, 0.0, False, False, None, None, None),
        by_tokens("_efficient_attention_forward", None, None, None, None, None, 0.0, 0, True),
        packed("_efficient_attention_forward", None, *ENDS, *LONGEST, DROPOUT, 0, True, batched=True),
        case("_cudnn_attention_forward", None, None, None, QUERIES, KEYS, True, 0.0),
        packed("_cudnn_attention_forward", None, *ENDS, *LONGEST, True, DROPOUT),
    )
    cases = tuple(case for case in cases if find_op(case.op))
    rows = tuple(row for row in sdpa.ROWS if row.name != DECOMPOSITION)


def test_every_overload_is_run() -> None:
    ops = {op.qualified_name for op in present_ops() if op.row in sdpa.ROWS}
    assert {row.name for row in sdpa.ROWS} == {name.partition("::")[2].partition(".")[0] for name in ops}
    assert ops - {f"aten::{DECOMPOSITION}"} == {case.op for case in TestSdpa.cases}


KERNELS = {
    SDPBackend.FLASH_ATTENTION: ("_scaled_dot_product_flash_attention", 1024),
    SDPBackend.EFFICIENT_ATTENTION: ("_scaled_dot_product_efficient_attention", 1024),
    SDPBackend.CUDNN_ATTENTION: ("_scaled_dot_product_cudnn_attention", 128),
}
"""SDPA's kernels on a GPU: the op, and the tokens that it is run with there."""


@pytest.fixture
def deterministic(backend: SDPBackend) -> Iterator[None]:
    """Two runs of the backward are equal.

    Flash and efficient attention have a deterministic one, which torch takes under deterministic algorithms unless
    these only warn. cuDNN's has none, and SDPA leaves it out under them. It adds up the gradient of a query in any
    order, over tiles of at least 64 keys: of 128 keys that is a sum of two, which is the same in either order.
    """
    torch.use_deterministic_algorithms(backend is not SDPBackend.CUDNN_ATTENTION)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_kernels(backend: SDPBackend, dropout_p: float, device: str, attention_executions: Counter[str]) -> None:
    """Executions 1 / 2 / 1 of the CUDA kernel, and equal gradients. On a CPU, of the one that stands in for it."""
    name, tokens = KERNELS[backend]
    op = f"aten::{name}"
    shape, dtype = ((2, 4, tokens, 64), torch.bfloat16) if device == "cuda" else ((2, 2, 16, 8), torch.float32)
    torch.manual_seed(0)
    inputs = {name: torch.randn(shape, device=device, dtype=dtype).requires_grad_() for name in "qkv"}
    if device == "cuda":
        support.count_kernel(op, "CUDA")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if device == "cpu":  # where SDPA takes none of these
            (case,) = (case for case in TestSdpa.cases if case.op == op)
            return case.call(q, k, v, dropout_p)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(attend(torch.tanh(q), k, v)), dropout_p)

    for policy, again in (("full", 1), ("attn_only", 0)):
        assert_region(region, inputs, attention_executions, again, policy)
    assert attention_executions == {op: 1}
