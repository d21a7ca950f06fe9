"""FastVideo 0.2.1: its real custom ops around flash-attn, over the real Python layers of flash-attn 2 and 4.

Its files are imported without the package around them, which needs a GPU and much else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fastac.backends import fastvideo as catalogue
from tests.backends import flash_4_on_cpu, flash_on_cpu, packages
from tests.backends.parity import HEADS, KEY_LENGTHS, KEYS, LENGTHS, QUERIES, QUERY_LENGTHS, Case, Parity, swapped

packages.use("fastvideo")
flash_on_cpu.flash_attn_2()
flash_4_on_cpu.flash_attn_4()
os.environ["FASTVIDEO_CONFIGURE_LOGGING"] = "0"


flash_on_cpu.package("fastvideo")
flash_on_cpu.package("fastvideo.attention")
flash_on_cpu.package("fastvideo.platforms", current_platform=None)
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch.cuda, "is_available", lambda: True)
    from fastvideo.attention.utils import flash_attn_cute as cute
from fastvideo.attention.utils import flash_attn_default as default
from fastvideo.attention.utils import flash_attn_no_pad as no_pad

cute._use_fa2 = lambda q, k, v: False  # a GPU as new as flash-attn 4 needs it
for _module in (default, no_pad, cute):
    for _op in list(vars(_module).values()):
        if getattr(_op, "_namespace", "") == "fastvideo":
            _op.register_kernel("cpu")(_op._init_fn)  # its own body

DENSE, PACKED = "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"

# Which tokens are no padding.
QUERY_MASK = torch.arange(QUERIES) < torch.tensor(QUERY_LENGTHS)[:, None]
KEY_MASK = torch.arange(KEYS) < torch.tensor(KEY_LENGTHS)[:, None]
OWN_PAIRS, PAIRS = (
    HEADS * sum(q * k for q, k in zip(QUERY_LENGTHS, lengths, strict=True)) for lengths in (QUERY_LENGTHS, KEY_LENGTHS)
)


of_qkv = swapped(lambda q, k, v, _: no_pad.flash_attn_no_pad_compilable(torch.stack([q, k, v], dim=2), QUERY_MASK))
of_both = swapped(lambda q, k, v, _: no_pad.flash_attn_varlen_qk_no_pad_compilable(q, k, v, QUERY_MASK, KEY_MASK))


def _flash_attn_cute_fp4_forward(*tensors: torch.Tensor) -> Any:
    heads = [tensor.transpose(1, 2) for tensor in tensors]
    return cute.flash_attn_fp4_func(*heads, *heads[:2]).transpose(1, 2)


def h3_vsa_sm100a_from_mask_compat(*tensors: torch.Tensor) -> Any:
    return torch.ops.fastvideo.h3_vsa_sm100a_from_mask_compat(*tensors, *tensors[:2])


# Its file needs fastvideo-kernel; the schema is as there.
_library = torch.library.Library("fastvideo", "FRAGMENT")
_arguments = ", ".join(f"Tensor {name}" for name in ("q", "k", "v", "block_map", "variable_block_sizes"))
_library.define(f"h3_vsa_sm100a_from_mask_compat({_arguments}) -> Tensor")
_library.impl("h3_vsa_sm100a_from_mask_compat", lambda q, *others: q.clone(), "CPU")


class TestFastVideo(Parity):
    """Without dropout: FastVideo's backward gives flash-attn no generator state, so its gradients are wrong with it."""

    cases = (
        Case(
            "fastvideo::_flash_attn_default_forward",
            swapped(lambda q, k, v, _: default.flash_attn_func_compilable(q, k, v)),
            kernel=DENSE,
            heads=4,
            kv_heads=2,
        ),
        Case("fastvideo::_flash_attn_no_pad_forward", of_qkv, kernel=PACKED, keys=QUERIES, pairs=OWN_PAIRS),
        Case("fastvideo::_flash_attn_varlen_qk_no_pad_forward", of_both, kernel=PACKED, pairs=PAIRS),
        Case(
            "fastvideo::_flash_attn_cute_forward",
            swapped(lambda q, k, v, _: cute.flash_attn_func(q, k, v)),
            kernel=flash_4_on_cpu.KERNEL,
            counts_backward=False,
        ),
        Case(
            "fastvideo::_flash_attn_cute_varlen_forward",
            lambda q, k, v, _: cute.flash_attn_varlen_func(q, k, v, *LENGTHS.values()),
            kernel=flash_4_on_cpu.KERNEL,
            packed=True,
            counts_backward=False,
        ),
    )
    rows = tuple(row for row in catalogue.ROWS if row.namespace == "fastvideo")
    refused = (_flash_attn_cute_fp4_forward, h3_vsa_sm100a_from_mask_compat)


def test_every_attention_op_of_fastvideo_has_a_row() -> None:
    """Read from its files; the others of its custom ops are norms and the like."""
    found = set()
    for path in Path(default.__file__).parents[1].rglob("*.py"):
        found |= set(re.findall(r"custom_op\(\s*\"fastvideo::(\w+)", path.read_text()))
    assert found - {row.name for row in TestFastVideo.rows} == {"nvfp4_quantize_fa4"}  # rounds, and attends to nothing
