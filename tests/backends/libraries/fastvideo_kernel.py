"""fastvideo-kernel 0.3.5: video sparse attention (VSA), by its Triton kernels and through its CUDA extensions' ops.

The Triton kernels are the real ones, interpreted. The extensions (sm90, sm100a) are stand-ins: the sm100a forward has
the results of the Triton forward, by its own documentation; that of sm90 another layout of statistics.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("fastvideo_kernel")

from tests.backends import triton_on_cpu

extension = sys.modules["fastvideo_kernel._C"] = ModuleType("fastvideo_kernel._C")
functions = extension.fastvideo_kernel_ops = SimpleNamespace()  # type: ignore[attr-defined]
triton_on_cpu.takes_for_cuda("fastvideo_kernel")

import fastvideo_kernel
from fastvideo_kernel import block_sparse_attn_varlen, ops, video_sparse_attn, video_sparse_attn_bshd
from fastvideo_kernel.triton_kernels import block_sparse_attn_triton as kernels

import fastac
from fastac.backends import fastvideo
from tests.backends.parity import Case, Parity
from tests.backends.sparse import assert_choice_is_kept, attention, mask_of, run_on_cpu, video_sparse_attention
from tests.support import train_step

# The module of this name is hidden behind the function of this name.
block_sparse = sys.modules["fastvideo_kernel.block_sparse_attn"]

NAMESPACE = "fastvideo_kernel"
BLOCK = 64
KEY_BLOCKS = 3
QUERIES, KEYS = 2 * BLOCK, KEY_BLOCKS * BLOCK
SIZES = torch.tensor([64, 40, 64], dtype=torch.int32)
"""Keys that count in each block: the last ones of a block may be padding."""

CHOSEN = ((2, 0), (1,), (0, 1)), ((0, 1, 2), (2, 1), (0,))
"""Blocks of keys, for each block of queries of each head; so many as there are are used."""

TOLERANCES = {torch.bfloat16: 3e-2}

triton_on_cpu.count_in_tensors(kernels)


# The extensions


def block_sparse_sm100a_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _: None,
    index: torch.Tensor,
    number: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
    need_statistics: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert scale == q.shape[-1] ** -0.5
    return kernels.triton_block_sparse_attn_forward(q, k, v, index, number, sizes)  # type: ignore[no-any-return]


def block_sparse_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, number: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output, statistics = kernels.triton_block_sparse_attn_forward(q, k, v, index, number, sizes)
    return output, statistics[..., None]


def block_sparse_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    index: torch.Tensor,
    number: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Given the blocks of queries of each block of keys; in float32, as the extension has it."""
    of_queries = block_sparse._invert_indices_for_backward(index, number, q.shape[2] // BLOCK)
    arguments = (grad, q, k, v, output, statistics[..., 0], *of_queries, index, number, sizes)
    return tuple(gradient.float() for gradient in kernels.triton_block_sparse_attn_backward(*arguments))


functions.block_sparse_fwd, functions.block_sparse_bwd = block_sparse_fwd, block_sparse_bwd
functions.block_sparse_sm100a_fwd = block_sparse_sm100a_fwd
sm100a = importlib.import_module("fastvideo_kernel.block_sparse_attn_sm100a")  # looks for it at its import

for _op in (
    block_sparse.block_sparse_attn_triton,
    block_sparse.block_sparse_attn_sm90,
    block_sparse.block_sparse_attn_sm100a_op,
    sm100a._block_sparse_attn_sm100a_inference,
    sm100a._block_sparse_attn_sm100a_from_mask_inference,
):
    run_on_cpu(_op, counts=True)
run_on_cpu(block_sparse.block_sparse_attn_backward_triton)
run_on_cpu(block_sparse.block_sparse_attn_backward_sm90)


# Cases


def chosen(query: torch.Tensor) -> list[list[tuple[int, ...]]]:
    return [list(rows[: query.shape[2] // BLOCK]) for rows in CHOSEN]


def block_map(query: torch.Tensor) -> torch.Tensor:
    """(1, heads, blocks of queries, blocks of keys): which blocks attend."""
    return torch.tensor([[[[i in row for i in range(KEY_BLOCKS)] for row in rows] for rows in chosen(query)]])


def indices(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, heads, blocks of queries, most blocks of keys), and how many of the last count."""
    number = torch.tensor([[[len(row) for row in rows] for rows in chosen(query)]], dtype=torch.int32)
    padded = [[[*row, *[-1] * (KEY_BLOCKS - len(row))] for row in rows] for rows in chosen(query)]
    return torch.tensor([padded], dtype=torch.int32), number


def chosen_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attention(query, key, value, mask_of(block_map(query), BLOCK, SIZES))


TOP = 2
"""Blocks of keys that video_sparse_attn chooses."""


def partial_sizes(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """All tokens of the first blocks count, not all of the last."""
    blocks = tensor.shape[2] // tokens
    return torch.tensor([*[tokens] * (blocks - 1), tokens - 24], dtype=torch.int32)


def video_reference(tokens: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    counts = partial_sizes(query, tokens), partial_sizes(key, tokens)
    return video_sparse_attention(query, key, value, tokens, TOP, *counts)


def video(tokens: int, *tensors: torch.Tensor) -> torch.Tensor:
    query, key, _, _ = tensors
    sizes = [partial_sizes(t, tokens) for t in (key, query)]
    return video_sparse_attn(*tensors[:3], *sizes, TOP, (1, 1, tokens))  # type: ignore[no-any-return]


def video_bshd(tokens: int, *tensors: torch.Tensor) -> torch.Tensor:
    query, key, _, _ = tensors
    sizes = [partial_sizes(t, tokens) for t in (key, query)]
    swapped = [t.transpose(1, 2) for t in tensors[:3]]
    return video_sparse_attn_bshd(*swapped, *sizes, TOP, (1, 1, tokens)).transpose(1, 2)  # type: ignore[no-any-return]


LENGTHS = {"query_lengths": (64, 100), "key_lengths": (100, 50)}


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    """Two sequences whose lengths are no multiples of a block, each attending to all of its own blocks."""

    def blocks(length: int) -> torch.Tensor:
        return torch.tensor([min(BLOCK, length - start) for start in range(0, length, BLOCK)], dtype=torch.int32)

    query_sizes, sizes = ([blocks(length) for length in lengths] for lengths in LENGTHS.values())
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS.values()]
    heads = query.shape[1]
    index = [
        torch.arange(len(own), dtype=torch.int32).expand(1, heads, len(mine), -1)
        for mine, own in zip(query_sizes, sizes, strict=True)
    ]
    number = [torch.full(i.shape[:3], i.shape[-1], dtype=torch.int32) for i in index]
    return block_sparse_attn_varlen(query, key, value, *ends, index, number, sizes, query_sizes)  # type: ignore[no-any-return]


def case(op: str, call: Callable[..., torch.Tensor], way: str = "", **options: Any) -> Case:
    shape = {"batch": 1, "queries": QUERIES, "keys": KEYS, "dim": 16} | options
    # Kernels calculate in bfloat16 and take nothing else.
    return Case(f"{NAMESPACE}::{op}", call, way, dtypes=(torch.bfloat16,), tolerances=TOLERANCES, **shape)


CASES = [
    case(
        "block_sparse_attn_triton",
        lambda q, k, v, _: fastvideo_kernel.block_sparse_attn_from_indices(q, k, v, *indices(q), SIZES)[0],
        "from indices",
        reference=chosen_reference,
        pairs=8 * BLOCK**2,
    ),
    case(
        "block_sparse_attn_triton",
        lambda q, k, v, _: fastvideo_kernel.block_sparse_attn(q, k, v, block_map(q), SIZES)[0],
        "from a map",
        reference=chosen_reference,
        pairs=8 * BLOCK**2,
    ),
    case("block_sparse_attn_triton", packed, "packed", packed=True, seen=(3 * BLOCK,), pairs=8 * BLOCK**2, **LENGTHS),
    case(
        "block_sparse_attn_triton",
        functools.partial(video, 64),
        "video_sparse_attn",
        reference=functools.partial(video_reference, 64),
        heads=1,
        pairs=QUERIES * TOP * 64,
    ),
    case(
        "block_sparse_attn_triton",
        functools.partial(video, 128),
        "video_sparse_attn, blocks of 128",
        reference=functools.partial(video_reference, 128),
        heads=1,
        pairs=256 * TOP * 128,
        queries=256,
        keys=384,
    ),
    case(
        "block_sparse_attn_triton",
        functools.partial(video_bshd, 256),
        "video_sparse_attn_bshd, blocks of 256",
        reference=functools.partial(video_reference, 256),
        heads=1,
        pairs=256 * TOP * 256,
        queries=256,
        keys=768,
    ),
    case(
        "block_sparse_attn_sm90",
        lambda q, k, v, _: block_sparse.block_sparse_attn_sm90(q, k, v, *indices(q), SIZES)[0],
        reference=chosen_reference,
        pairs=8 * BLOCK**2,
    ),
    case(
        "block_sparse_attn_sm100a",
        lambda q, k, v, _: block_sparse.block_sparse_attn_sm100a_op(q, k, v, *indices(q), SIZES)[0],
        reference=chosen_reference,
        pairs=11 * BLOCK**2,
        queries=KEYS,  # it takes the number of blocks from the keys
    ),
]

INFERENCE = {
    "block_sparse_attn_sm100a_inference": lambda q, k, v: sm100a.block_sparse_attn_sm100a(
        q, k, v, *indices(q), SIZES, need_lse=False
    )[0],
    "block_sparse_attn_sm100a_from_mask_inference": lambda q, k, v: sm100a.block_sparse_attn_sm100a_from_mask(
        q, k, v, block_map(q), SIZES
    )[0],
}


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.ROWS if row.namespace == NAMESPACE)
    not_run = dict.fromkeys(INFERENCE, "has no backward: test_inference_is_refused")


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_is_refused(name: str) -> None:
    inputs = CASES[-1].inputs(torch.bfloat16)
    region = functools.partial(fastac.checkpoint, lambda query, key, value: INFERENCE[name](query, key, value) * query)
    with pytest.raises(fastac.UnsupportedBackendError, match=rf"{NAMESPACE}.{name}\b.*for inference"):
        train_step(region, inputs)


# The choice of blocks


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_recompute_keeps_the_chosen_blocks(engine: str) -> None:
    """They are chosen by a kernel that no op shows: the op that gets them has them among its arguments."""
    assert_choice_is_kept(
        next(case for case in CASES if case.way == "video_sparse_attn"), engine, (ops, "fused_topk_mask")
    )
