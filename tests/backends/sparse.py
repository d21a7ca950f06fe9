"""What the tests of sparse attention share: kernels, and which blocks attend."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests import support
from tests.backends.parity import Case


def run_on_cpu(op: Any, counts: bool = False) -> None:
    """Let a library's custom op, registered for CUDA alone, run its own Python code on the CPU.

    counts: each run, in `support.executions`, by the name of the op.
    """
    implementation = op._init_fn

    def kernel(*args: Any) -> Any:
        if counts:
            support.executions[op._qualname] += 1
        return implementation(*args)

    op.register_kernel("cpu")(kernel)


def map_of(index: torch.Tensor, number: torch.Tensor, width: int) -> torch.Tensor:
    """Which of so many blocks are in each list of them. index: (..., longest), of which the first `number` count."""
    counts = torch.arange(index.shape[-1]) < number[..., None]
    found = torch.zeros(*number.shape, width + 1, dtype=torch.bool)  # what does not count goes into one more
    return found.scatter_(-1, torch.where(counts, index.long(), width), True)[..., :width]


def bias_of(blocks: torch.Tensor, block: tuple[int, int], counts: torch.Tensor) -> torch.Tensor:
    """What keeps tokens of other blocks out of the scores: 0 or -inf.

    blocks: (..., blocks of queries, blocks of keys), which attend. block: tokens in one of each. counts: which keys do.
    """
    attend = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1) & counts
    return torch.zeros(()).masked_fill(~attend, -torch.inf)


BLOCK, BLOCKS, TOP = 64, 3, 2
"""Tokens in a block of video sparse attention. In the cases: blocks of queries and of keys, and how many attend."""

TOKENS = BLOCKS * BLOCK
case = functools.partial(Case, batch=1, queries=TOKENS, keys=TOKENS, dim=16)


def _bias(blocks: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return bias_of(blocks, (BLOCK, BLOCK), (torch.arange(BLOCK) < sizes[:, None]).flatten())


def block_sparse_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, number: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of the H100's extension for video sparse attention, in plain math.

    index, number: the blocks of keys of each block of queries. sizes: keys that count in each block.
    """
    bias = _bias(map_of(index, number, len(sizes)), sizes)
    output, statistics = support.attention_math(q.float(), k.float(), v.float(), bias=bias)
    return output.to(q.dtype), statistics[..., None]


def block_sparse_bwd(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its backward, given the blocks of queries of each block of keys; in float32, as the extension has it."""
    q, k, v, output, statistics, grad, index, number, sizes = given
    bias = _bias(map_of(index, number, q.shape[2] // BLOCK).transpose(-1, -2), sizes)
    tensors = (tensor.float() for tensor in (grad, q, k, v, output))
    return support.attention_math_backward(*tensors, statistics[..., 0], bias=bias)
