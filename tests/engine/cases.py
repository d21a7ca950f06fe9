"""Blocks of one attention, and the assertion that a policy changes nothing but how often kernels run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.support import assert_same, stack, stack_inputs, train_step

Attend = Callable[..., torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]

OWN_ALONE = fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
"""Saves the self-attention of an AttentionBlock and recomputes its cross-attention."""


class OneAttention(torch.nn.Module):
    """Projections, one attention, what a test does to its output, a projection. The text is not used."""

    def __init__(self, attend: Attend = F.scaled_dot_product_attention, change: Change | None = None) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(support.WIDTH, 3 * support.WIDTH)
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.attend = attend
        self.change = change

    def heads(self, video: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(video).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output = self.attend(*self.heads(video))
        if self.change is not None:
            output = self.change(output)
        return self.out(output.transpose(1, 2).flatten(2))


def assert_exact(
    block: Callable[[], torch.nn.Module],
    executions: Counter[str],
    expected: dict[str, int],
    policy: str | fastac.Policy = "attn_only",
    backward: Callable[..., Any] | None = None,
    **inputs_options: Any,
) -> None:
    """Two layers of a block train as without checkpointing, bit for bit, with so many kernel executions per step.

    Twice: the first region of its kind is watched, later ones are not.
    """
    inputs = stack_inputs(**inputs_options)
    reference = train_step(stack(block=block), inputs, backward=backward)
    model = stack(block=block, policy=policy)
    for _ in range(2):
        executions.clear()
        assert_same(train_step(model, inputs, backward=backward), reference)
        assert executions == expected


def add_one(output: torch.Tensor) -> torch.Tensor:
    output += 1
    return output


def add_one_to_a_view(output: torch.Tensor) -> torch.Tensor:
    output.transpose(1, 2)[:, :3].add_(1)
    return output


def add_one_without_grad(output: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output.add_(1)
    return output


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()
