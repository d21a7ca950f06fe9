"""What the tests of sparse attention share: kernels, and which blocks attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import support


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


def extension(kernels: Any, inverted: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the H100's extension for video sparse attention, by the Triton kernels of a module.

    inverted: (lists of blocks of keys, how many count, blocks of keys) -> the same of blocks of queries.
    """

    def forward(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, statistics = kernels.triton_block_sparse_attn_forward(*arguments)
        return output, statistics[..., None]

    def backward(
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
        arguments = (grad, q, k, v, output, statistics[..., 0], *inverted(index, number, q.shape[2] // 64))
        found = kernels.triton_block_sparse_attn_backward(*arguments, index, number, sizes)
        return tuple(gradient.float() for gradient in found)

    return forward, backward
