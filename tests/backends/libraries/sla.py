"""Sparse-linear attention (SLA): fastvideo-kernel's autograd.Function over Triton, and FastVideo's layer that calls it.

The Triton kernels are the real ones, interpreted. Of fastvideo only the layer's file is imported.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import torch

from tests.backends import packages

packages.use("sla")

from tests.backends import flash_on_cpu, triton_on_cpu

for _name in ("fastvideo", "fastvideo.attention", "fastvideo.attention.backends"):
    flash_on_cpu.package(_name)
flash_on_cpu.substitute("fastvideo.logger").init_logger = logging.getLogger  # type: ignore[attr-defined]

from fastvideo.attention.backends import sla
from fastvideo_kernel.triton_kernels import sla_triton as kernels

from fastac.backends import fastvideo
from tests.backends.parity import Parity, contiguous, swapped
from tests.backends.sparse import BLOCK, BLOCKS, TOP
from tests.backends.sparse import case as sparse_case

LAUNCHES = "sla_triton._attn_fwd"
HEADS, DIM = 2, 16
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 1], [1, 1, 0]], [[1, 1, 0], [0, 1, 1], [1, 0, 1]]]], dtype=torch.int8)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend, TOP in each row."""

triton_on_cpu.count_launches(kernels, "_attn_fwd", LAUNCHES)


@contiguous
def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> Any:
    chosen = MAP.nonzero()[:, -1].clone().view(*MAP.shape[:3], TOP)
    return kernels._attention.apply(query, key, value, MAP, chosen, TOP, BLOCK, BLOCK)


LAYER = sla.SLAAttentionImpl(HEADS, DIM, topk_ratio=TOP / BLOCKS, BLKQ=BLOCK)
LAYER.proj_l.bfloat16()  # it calls its projection, in float32, under CUDA's autocast, which means nothing here


layer_call = swapped(lambda q, k, v, _: LAYER(q, k, v, SimpleNamespace()))
case = functools.partial(
    sparse_case, "", function=kernels._attention, kernel=LAUNCHES, pairs=12 * BLOCK**2, counts_backward=False
)


class TestSla(Parity):
    """FastVideo's layer chooses blocks before it calls the Function, to which they are inputs."""

    cases = (case(function, "function"), case(layer_call, "FastVideo's layer", chooser=(torch, "topk")))
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "sla")
