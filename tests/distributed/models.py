"""Stacks of blocks that communicate, by Ulysses or tensor parallel, and models in the engines that shard them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support import AttentionBlock, AttentionStack, run_checkpointed, stack, stack_inputs


def sharded(model: Any, **options: Any) -> Any:
    """FSDP2: every block a unit, and the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def flat(model: Any) -> torch.nn.Module:
    """FSDP1 by block, with the original parameters beside the flat ones: Wan's forward reads their dtype."""
    units = ModuleWrapPolicy({type(model.blocks[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=True)


def sharded_inside(model: Any) -> Any:
    """Every Linear inside blocks a unit, too, whose parameters are gathered while its block runs."""
    for module in model.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            fully_shard(module)
    return sharded(model)


class Differentiable(torch.autograd.Function):
    """A collective and the one that is its backward, as in torch and diffusers."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Any, backward: Any) -> torch.Tensor:
        ctx.op = backward
        return op(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.op(grad.contiguous()), None, None


def all_to_all_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


# Ulysses: the tokens are split over the ranks, with four exchanges per attention

EXCHANGES = 4
"""All-to-alls of one attention: query, key, value, output."""


def sent(parts: torch.Tensor) -> torch.Tensor:
    """Part i to rank i, by a functional collective."""
    received: torch.Tensor = functional.all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return received


def ulysses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    send: Callable[[torch.Tensor], torch.Tensor] = sent,
    **options: Any,
) -> torch.Tensor:
    """Attention of (batch, heads, tokens of this rank, dim): all tokens for some of the heads, and back."""

    def exchanged(tensor: torch.Tensor, gather: int, split: int) -> torch.Tensor:
        parts = torch.stack(tensor.chunk(dist.get_world_size(), dim=split)).contiguous()
        return torch.cat(list(send(parts).unbind(0)), dim=gather)

    whole = [exchanged(tensor, gather=2, split=1) for tensor in (query, key, value)]
    return exchanged(F.scaled_dot_product_attention(*whole, **options), gather=1, split=2)


def ulysses_stack(layers: int = 2, **options: Any) -> AttentionStack:
    """The model, the same on every rank, with Ulysses over the video and over the text."""
    return stack(layers=layers, block=functools.partial(AttentionBlock, attend=ulysses), **options)


def part_of_inputs() -> dict[str, torch.Tensor]:
    """This rank's part of the tokens of video and text."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: tensor.detach().chunk(world, dim=1)[rank].clone().requires_grad_()
        for name, tensor in stack_inputs().items()
    }


# Tensor parallel


class Attention(torch.nn.Module):
    """Self-attention of as many heads as this rank has."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    """A transformer block as in guides to tensor parallelism. affine: whether its norms have weights."""

    def __init__(self, affine: bool, width: int, head: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, elementwise_affine=affine) for _ in range(2))
        self.attention = Attention(width, head)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _plan(kind: str) -> dict[str, Any]:
    plan: dict[str, Any] = {part: ColwiseParallel() for part in ("attention.q", "attention.k", "attention.v", "up")}
    last = ("attention.out", "down")
    if kind == "sequence":
        plan |= {part: RowwiseParallel(output_layouts=Shard(1)) for part in last}
        plan |= {f"norms.{i}": SequenceParallel() for i in range(2)}
        taken = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        return plan | {"attention": taken, "up": ColwiseParallel(input_layouts=Shard(1))}
    if kind == "hidden":
        return plan | {part: RowwiseParallel(output_layouts=Partial(), use_local_output=False) for part in last}
    return plan | {part: RowwiseParallel() for part in last}


class TensorParallel(torch.nn.Module):
    """Blocks, each checkpointed.

    kind: how they are parallel over two ranks: "plain", "sequence" with the sequence split between the parts of a
    block, "hidden" with redistributions inside DTensor's ops.
    """

    def __init__(self, kind: str, policy: Any, width: int = 16, head: int = 4, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(kind != "hidden", width, head) for _ in range(layers))
        self.kind, self.policy = kind, policy
        self.mesh = init_device_mesh("cpu", (2,))
        for block in self.blocks:
            parallelize_module(block, self.mesh, _plan(kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sequence":
            x = x.chunk(2, 1)[dist.get_rank()]
        if self.kind == "hidden":
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        for block in self.blocks:
            x = run_checkpointed(block, x, policy=self.policy)
        if self.kind == "sequence":
            x = DTensor.from_local(x, self.mesh, [Shard(1)])
        return x.full_tensor() if isinstance(x, DTensor) else x
