"""A stack of DiT blocks whose tokens are split over the ranks, as Ulysses does it: four exchanges per attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

from tests.support import AttentionBlock, AttentionStack, stack, stack_inputs

EXCHANGES = 4
"""All-to-alls of one attention: query, key, value, output."""


def exchanged(tensor: torch.Tensor, gather: int, split: int) -> torch.Tensor:
    """An all-to-all over all ranks: one dimension is gathered, another is split."""
    world = dist.get_world_size()
    parts = torch.stack(tensor.chunk(world, dim=split)).contiguous()
    received = functional.all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return torch.cat(list(received.unbind(0)), dim=gather)


def ulysses(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention of (batch, heads, tokens of this rank, dim): all tokens for some of the heads, and back."""
    whole = [exchanged(tensor, gather=2, split=1) for tensor in (query, key, value)]
    return exchanged(F.scaled_dot_product_attention(*whole, **options), gather=1, split=2)


class UlyssesBlock(AttentionBlock):
    """A block whose attention is Ulysses', over the video and over the text."""

    def __init__(self) -> None:
        super().__init__(attend=ulysses)


def ulysses_stack(layers: int = 2, **options: Any) -> AttentionStack:
    """The model, the same on every rank."""
    return stack(layers=layers, block=UlyssesBlock, **options)


def part_of_inputs() -> dict[str, torch.Tensor]:
    """This rank's part of the tokens of video and text."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: tensor.detach().chunk(world, dim=1)[rank].clone().requires_grad_()
        for name, tensor in stack_inputs().items()
    }
