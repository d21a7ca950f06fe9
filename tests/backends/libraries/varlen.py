"""torch.nn.attention.varlen: the real custom ops and their Python layer, over `aten::_flash_attention_forward`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from fastac.backends import varlen
from tests.backends.aten_on_cpu import cpu_kernels as cpu_kernels
from tests.backends.parity import LENGTHS, Case, Parity

KERNEL = "aten::_flash_attention_forward"


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, **options: Any) -> torch.Tensor:
    return varlen_attn(query, key, value, *LENGTHS.values(), **options)


case = functools.partial(Case, "torch_attn::_varlen_attn", kernel=KERNEL, packed=True)


class TestVarlen(Parity):
    cases = (
        case(attend),
        case(functools.partial(attend, enable_gqa=True), way="grouped", heads=4, kv_heads=2),
    )
    rows = varlen.ROWS
