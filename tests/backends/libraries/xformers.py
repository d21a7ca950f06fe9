"""xFormers 0.0.35: its real Python layer, dispatcher and autograd.Function, over each kernel that it can end in."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import fastac
from fastac.backends import xformers as catalogue
from tests.backends import packages, xformers_on_cpu
from tests.backends.parity import DIM, KEY_LENGTHS, QUERIES, QUERY_LENGTHS, Case, Parity, causal, window
from tests.support import assert_same, train_step

packages.use("xformers")
ops = xformers_on_cpu.xformers()

from xformers.ops.fmha import ck, cutlass, cutlass_blackwell, flash, flash3
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    with xformers_on_cpu.registered():
        yield


def pair(module: Any) -> Any:
    return module.FwOp, module.BwOp


def dense(bias: Any = None, kernel: Any = None) -> Callable[..., torch.Tensor]:
    """kernel: the module of one; otherwise that which the dispatcher finds."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
        tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        op = pair(kernel) if kernel is not None else None
        return ops.memory_efficient_attention(*tensors, attn_bias=bias, p=dropout_p, op=op).transpose(1, 2)

    return call


def packed(kernel: Any, lengths: list[tuple[int, ...]], bias: Any = BlockDiagonalMask) -> Callable[..., torch.Tensor]:
    """lengths: of the sequences of queries and of keys."""
    mask = bias.from_seqlens(*map(list, lengths))

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
        tensors = (query[None], key[None], value[None])
        return ops.memory_efficient_attention(*tensors, attn_bias=mask, p=dropout_p, op=pair(kernel))[0]

    return call


SWAPPED = "torch's formula takes sequences for heads: test_what_torch_counts_otherwise in tests/backends/test_sdpa.py"
OWN_FORMULA = "xFormers has a formula of its own, which leaves out what is masked"


def variants(
    kernel: Any,
    op: str,
    counted_as: str = "",
    *,
    drops: bool = True,
    dim: int = DIM,
    queries: int = QUERIES,
    lengths: tuple[int, ...] = QUERY_LENGTHS,
) -> list[Case]:
    """The ways to attend that every kernel has. lengths: of packed sequences of queries."""
    case = functools.partial(Case, op, kernel=counted_as, drops=drops, dim=dim, queries=queries, query_lengths=lengths)
    swapped = SWAPPED if kernel is cutlass else ""
    masked = OWN_FORMULA if kernel is flash3 else swapped
    both, own = [lengths, KEY_LENGTHS], [lengths, lengths]
    # ck is not told the longest sequence of keys: the keys of all of them count.
    seen = [(sum(keys),) if kernel is ck else () for keys in (KEY_LENGTHS, lengths)]
    return [
        case(dense(None, kernel), without_flops=swapped),
        case(dense(None, kernel), way="self", keys=queries, without_flops=swapped),
        case(dense(LowerTriangularMask(), kernel), way="causal", keys=queries, mask=causal, without_flops=masked),
        replace(
            case(dense(LowerTriangularFromBottomRightMask(), kernel), way="causal cross", mask=causal),
            queries=8,
            without_flops=masked,
        ),
        case(packed(kernel, both), way="packed", packed=True, seen=seen[0]),
        case(
            packed(kernel, own, BlockDiagonalCausalMask),
            way="packed causal",
            packed=True,
            mask=causal,
            key_lengths=lengths,
            seen=seen[1],
            without_flops=OWN_FORMULA if kernel is flash3 else "",
        ),
    ]


def on_one_side(queries: int, keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(queries, keys, generator=generator)


def biased(kernel: Any) -> Callable[..., torch.Tensor]:
    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
        whole = torch.zeros(query.shape[0], query.shape[1], QUERIES, 16)  # aligned in memory, as a GPU needs it
        whole[..., : key.shape[2]] = on_one_side(QUERIES, key.shape[2])
        return dense(whole[..., : key.shape[2]], kernel)(query, key, value, dropout_p)

    return call


CASES = [
    *variants(flash, "xformers_flash::flash_fwd", "aten::_flash_attention_forward"),
    Case(
        "xformers_flash::flash_fwd",
        dense(LowerTriangularFromBottomRightLocalAttentionMask(4), flash),
        way="window",
        kernel="aten::_flash_attention_forward",
        keys=QUERIES,
        mask=window(3, 0),
    ),
    *variants(flash3, "xformers_flash3::flash_fwd", "flash_attn_3::fwd", drops=False, dim=64),
    *variants(cutlass, "aten::_efficient_attention_forward"),
    Case("aten::_efficient_attention_forward", biased(cutlass), way="bias", mask=on_one_side, without_flops=SWAPPED),
    *variants(ck, "xformers::efficient_attention_forward_ck"),
    Case("xformers::efficient_attention_forward_ck", biased(ck), way="bias", mask=on_one_side),
    *variants(cutlass_blackwell, "fbgemm::fmha_fwd", drops=False, dim=64, queries=9, lengths=(4, 3, 5)),
]


class TestParity(Parity):
    cases = CASES
    rows = catalogue.ROWS
    not_run: ClassVar[Mapping[str, str]] = {
        "memory_efficient_attention_forward": "has no backward: test_the_op_without_a_backward_is_refused"
    }


def test_the_dispatcher_finds_each_kernel(monkeypatch: pytest.MonkeyPatch, attention_executions: Counter[str]) -> None:
    """memory_efficient_attention without `op`, as diffusers calls it: what is saved is what xFormers chose."""
    ends_in = [
        (Case("", dense()), None, "xformers::efficient_attention_forward_ck"),  # a build for ROCm
        (Case("", dense(), dim=64), "12.8", "flash_attn_3::fwd"),
        (Case("", dense()), "12.8", "aten::_flash_attention_forward"),
        (Case("", biased(None)), "12.8", "aten::_efficient_attention_forward"),
    ]
    for case, cuda, kernel in ends_in:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        inputs = case.inputs()
        reference = train_step(case.region, inputs)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(functools.partial(fastac.checkpoint, case.region), inputs), reference)
            assert attention_executions == {kernel: 1}


def test_the_op_without_a_backward_is_refused() -> None:
    """`xformer::memory_efficient_attention_forward`: through it, no gradient comes."""
    library = torch.library.Library("xformer", "IMPL")
    library.impl("memory_efficient_attention_forward", lambda q, k, v, *args: q.clone(), "CPU")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensors = [torch.tanh(tensor) for tensor in (query, key, value)]
        return torch.ops.xformer.memory_efficient_attention_forward(*tensors) + query

    try:
        with pytest.raises(fastac.UnsupportedBackendError, match=r"does not train: it is the forward alone; call"):
            train_step(functools.partial(fastac.checkpoint, region), CASES[0].inputs())
    finally:
        library._destroy()
