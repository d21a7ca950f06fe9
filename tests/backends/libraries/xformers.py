"""xFormers 0.0.35: its real Python layer, dispatcher and autograd.Function, over each kernel that it can end in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastac.backends import xformers as catalogue
from tests.backends import packages, xformers_on_cpu
from tests.backends.parity import DIM, KEY_LENGTHS, QUERIES, QUERY_LENGTHS, SWAPPED, Case, Parity

packages.use("xformers")
ops = xformers_on_cpu.xformers()

from xformers.ops.fmha import ck, cutlass, cutlass_blackwell, flash, flash3
from xformers.ops.fmha.attn_bias import BlockDiagonalMask


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    with xformers_on_cpu.registered():
        yield


def attention(kernel: Any, bias: Any = None) -> Callable[..., torch.Tensor]:
    """kernel: the module of one. bias: where sequences are packed, that between them."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
        tensors = [one.transpose(1, 2) if bias is None else one[None] for one in (query, key, value)]
        op = kernel.FwOp, kernel.BwOp
        output: torch.Tensor = ops.memory_efficient_attention(*tensors, attn_bias=bias, p=dropout_p, op=op)
        return output.transpose(1, 2) if bias is None else output[0]

    return call


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
    case = functools.partial(Case, op, kernel=counted_as, drops=drops, dim=dim)
    between = BlockDiagonalMask.from_seqlens(list(lengths), list(KEY_LENGTHS))
    # ck does not get the longest sequence of keys: keys of all sequences count.
    seen = (sum(KEY_LENGTHS),) if kernel is ck else ()
    return [
        case(attention(kernel), queries=queries, without_flops=SWAPPED if kernel is cutlass else ""),
        case(attention(kernel, between), "packed", packed=True, query_lengths=lengths, seen=seen),
    ]


_library = torch.library.Library("xformer", "IMPL")
_library.impl("memory_efficient_attention_forward", lambda q, k, v, *args: q.clone(), "CPU")


def memory_efficient_attention_forward(*tensors: torch.Tensor) -> Any:
    return torch.ops.xformer.memory_efficient_attention_forward(*tensors)


class TestXFormers(Parity):
    cases = (
        *variants(flash, "xformers_flash::flash_fwd", "aten::_flash_attention_forward"),
        *variants(flash3, "xformers_flash3::flash_fwd", "flash_attn_3::fwd", drops=False, dim=64),
        *variants(cutlass, "aten::_efficient_attention_forward"),
        *variants(ck, "xformers::efficient_attention_forward_ck"),
        *variants(cutlass_blackwell, "fbgemm::fmha_fwd", drops=False, dim=64, queries=9, lengths=(4, 3, 5)),
    )
    rows = catalogue.ROWS
    refused = (memory_efficient_attention_forward,)
