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
from torch.utils.flop_counter import flop_registry

import fastac
from fastac.backends import sdpa
from fastac.engine import releases
from fastac.registry import find_op, present_ops
from tests import support
from tests.backends import aten_on_cpu
from tests.backends.parity import DIM, HEADS, KEY_LENGTHS, KEYS, QUERIES, QUERY_LENGTHS, Case, Parity, ends, swapped
from tests.engine.cases import OneAttention, assert_exact
from tests.marks import needs_torch
from tests.support import assert_same, train_step

aten = torch.ops.aten
ENDS = ends(QUERY_LENGTHS), ends(KEY_LENGTHS)
LONGEST = max(QUERY_LENGTHS), max(KEY_LENGTHS)
SWAPPED = "torch's formula takes sequences for heads: test_what_torch_counts_otherwise"
DECOMPOSITION = "_safe_softmax"


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels() -> Iterator[None]:
    with aten_on_cpu.registered():
        yield


class TestSdpa(Parity):
    cases = (
        Case(
            "aten::_scaled_dot_product_flash_attention",
            lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p)[0],
            drops=True,
        ),
        Case(
            "aten::_scaled_dot_product_flash_attention.quantized",
            lambda q, k, v, p: aten._scaled_dot_product_flash_attention.quantized(q, k, v, None, None, None, p)[0],
            differentiable=False,
        ),
        Case(
            "aten::_scaled_dot_product_efficient_attention",
            lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p)[0],
            drops=True,
        ),
        Case(
            "aten::_scaled_dot_product_cudnn_attention",
            lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p)[0],
            drops=True,
        ),
        Case(
            "aten::_scaled_dot_product_fused_attention_overrideable",
            lambda q, k, v, p: aten._scaled_dot_product_fused_attention_overrideable(q, k, v, None, p)[0],
            drops=True,
        ),
        Case(
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            lambda q, k, v, p: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
        ),
        Case(
            "aten::_scaled_dot_product_attention_math_for_mps",
            lambda q, k, v, p: aten._scaled_dot_product_attention_math_for_mps(q, k, v)[0],
            differentiable=False,
        ),
        Case(
            "aten::_flash_attention_forward",
            swapped(
                lambda q, k, v, p: aten._flash_attention_forward(q, k, v, None, None, QUERIES, KEYS, p, False, False)[0]
            ),
            without_flops=SWAPPED,
        ),
        Case(
            "aten::_flash_attention_forward",
            lambda q, k, v, p: aten._flash_attention_forward(q, k, v, *ENDS, *LONGEST, p, False, False)[0],
            packed=True,
            way="packed",
            drops=True,
        ),
        Case(
            "aten::_flash_attention_forward.quantized",
            lambda q, k, v, p: aten._flash_attention_forward.quantized(
                q, k, v, *ENDS, *LONGEST, p, False, False, None, None, None
            )[0],
            packed=True,
            differentiable=False,
        ),
        Case(
            "aten::_efficient_attention_forward",
            swapped(
                lambda q, k, v, p: aten._efficient_attention_forward(q, k, v, None, None, None, None, None, p, 0, True)[
                    0
                ]
            ),
            without_flops=SWAPPED,
        ),
        Case(
            "aten::_efficient_attention_forward",
            lambda q, k, v, p: aten._efficient_attention_forward(
                q[None], k[None], v[None], None, *ENDS, *LONGEST, p, 0, True
            )[0][0],
            packed=True,
            way="packed",
            drops=True,
        ),
        Case(
            "aten::_cudnn_attention_forward",
            lambda q, k, v, p: aten._cudnn_attention_forward(q, k, v, None, None, None, QUERIES, KEYS, True, p)[0],
        ),
        Case(
            "aten::_cudnn_attention_forward",
            lambda q, k, v, p: aten._cudnn_attention_forward(q, k, v, None, *ENDS, *LONGEST, True, p)[0],
            packed=True,
            way="packed",
            drops=True,
        ),
    )
    cases = tuple(case for case in cases if find_op(case.op))
    rows = tuple(row for row in sdpa.ROWS if row.name != DECOMPOSITION)


@needs_torch("2.15")  # before, it runs as small ops: tests/diagnosis/test_causes.py
def test_a_query_without_heads(attention_executions: Counter[str]) -> None:
    def attend(*heads: torch.Tensor) -> torch.Tensor:
        flat = F.scaled_dot_product_attention(*[one.flatten(0, 1) for one in heads])
        return flat.unflatten(0, heads[0].shape[:2])

    assert_exact(lambda: OneAttention(attend), attention_executions, {support.CPU_ATTENTION: 2})


@needs_torch("2.12")  # before, it refuses the shapes
@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
def test_what_torch_counts_otherwise(name: str) -> None:
    """Its formulas of these two take (batch, sequence, heads, dim) for (batch, heads, sequence, dim), where no packed
    sequences are given. A formula that is there stays; xFormers' cutlass kernel is such a call."""
    query, key = torch.empty(2, 24, 3, 8), torch.empty(2, 12, 3, 8)
    ends_and_longest = (None,) * (4 if name == "_flash_attention_forward" else 5)
    counted = flop_registry[getattr(aten, name)](query, key, key, *ends_and_longest)
    mended = name == "_flash_attention_forward" and releases.is_at_least("2.15")
    assert counted == 4 * 2 * 24 * (3 * 12 if mended else 3 * 3) * 8


def test_every_overload_is_run() -> None:
    ops = {op.qualified_name for op in present_ops() if op.row in sdpa.ROWS}
    assert {row.name for row in sdpa.ROWS} == {name.partition("::")[2].partition(".")[0] for name in ops}
    assert ops - {f"aten::{DECOMPOSITION}"} == {case.op for case in TestSdpa.cases}


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": torch.randn(QUERIES, QUERIES)},
        {"attn_mask": torch.ones(QUERIES, QUERIES).tril().bool()},
        {"enable_gqa": True},
    ],
    ids=["causal", "float mask", "bool mask", "grouped queries"],
)
def test_sdpa_on_the_cpu(options: dict[str, Any], attention_executions: Counter[str]) -> None:
    """scaled_dot_product_attention itself, and the op that it ends in."""
    heads = {"query": HEADS} | dict.fromkeys(("key", "value"), 1 if "enable_gqa" in options else HEADS)
    inputs = {name: torch.randn(2, count, QUERIES, DIM, requires_grad=True) for name, count in heads.items()}

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.scaled_dot_product_attention(torch.tanh(query), key, value, **options))

    reference = train_step(region, inputs)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert attention_executions == {support.CPU_ATTENTION: 1}


def test_math_fallback_is_told_from_attention() -> None:
    """The decomposition row: a call of aten::_safe_softmax means that an attention had nothing to save."""
    inputs = {name: torch.randn(1, HEADS, QUERIES, DIM, requires_grad=True) for name in ("query", "key", "value")}
    region = functools.partial(fastac.checkpoint, F.scaled_dot_product_attention)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fastac.PolicyNotAppliedError, match="math kernel"):
        train_step(region, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("backend", "op"),
    [
        (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
        (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cuda_kernels(backend: SDPBackend, op: str, dropout_p: float, attention_executions: Counter[str]) -> None:
    """Executions 1 / 2 / 1 of the CUDA kernel, and equal gradients; torch is told to take deterministic backwards."""
    support.count_kernel(f"aten::{op}", "CUDA")
    torch.manual_seed(0)
    inputs = {
        name: torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name in ("query", "key", "value")
    }

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(torch.tanh(query), key, value, dropout_p=dropout_p)
        return F.dropout(torch.tanh(output), dropout_p)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        reference = train_step(region, inputs)
        for policy, executions in (("full", 2), ("attn_only", 1)):
            attention_executions.clear()
            found = train_step(functools.partial(fastac.checkpoint, region, policy=policy), inputs)
            assert_same(found, reference)
            assert attention_executions == {f"aten::{op}": executions}
    finally:
        torch.use_deterministic_algorithms(False)
