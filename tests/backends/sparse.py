"""What the tests of sparse attention share: choices of blocks that recompute would make otherwise, and block maps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

import fastac
from tests import support
from tests.backends.parity import Case
from tests.support import assert_same, train_step


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


def _times(scores: torch.Tensor, sign: int) -> torch.Tensor:
    return scores * sign


def assert_choice_is_kept(
    case: Case, chooser: tuple[Any, str], turn: Callable[[torch.Tensor, int], torch.Tensor] = _times
) -> None:
    """Gradients are right although recompute would choose the other way around.

    chooser: whose function of that name chooses; its first argument is turned, by the sign -1, at every second call.
    """
    region, inputs = case.region, case.inputs()
    reference = train_step(region, inputs)
    choose, calls = getattr(*chooser), Counter[str]()

    def choose_otherwise(scores: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls["choices"] += 1
        return choose(turn(scores, 1 if calls["choices"] % 2 else -1), *args, **options)

    def step(policy: str) -> support.Tensors:
        calls.clear()
        return train_step(functools.partial(fastac.checkpoint, region, policy=policy), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*chooser, choose_otherwise)
        try:
            full = step("full")
        except CheckpointError:
            pass  # another choice of another size
        else:
            assert any(not torch.equal(full[name], reference[name]) for name in reference), "no matter what it chooses"
        assert_same(step("attn_only"), reference)
