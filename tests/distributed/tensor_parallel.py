"""A stack of blocks that is tensor parallel by DTensor, as its guides have it; with its sequence split, too, or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests import support


class Attention(torch.nn.Module):
    """Self-attention of as many heads as this rank has."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in (self.q, self.k, self.v)]
        out: torch.Tensor = self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return out


class FeedForward(torch.nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(torch.nn.Module):
    """A transformer block, as the guides of tensor parallelism have it. affine: whether its norms have weights."""

    def __init__(self, affine: bool, width: int, head: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, elementwise_affine=affine) for _ in range(2))
        self.attention, self.feed_forward = Attention(width, head), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


def _plan(kind: str) -> dict[str, Any]:
    plan: dict[str, Any] = {
        f"{part}": ColwiseParallel() for part in ("attention.q", "attention.k", "attention.v", "feed_forward.up")
    }
    last = ("attention.out", "feed_forward.down")
    if kind == "sequence":
        plan |= {part: RowwiseParallel(output_layouts=Shard(1)) for part in last}
        plan |= {f"norms.{i}": SequenceParallel() for i in range(2)}
        taken = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        return plan | {"attention": taken, "feed_forward": taken}
    if kind == "hidden":
        return plan | {part: RowwiseParallel(output_layouts=Partial(), use_local_output=False) for part in last}
    return plan | {part: RowwiseParallel() for part in last}


class TensorParallel(torch.nn.Module):
    """Blocks, each checkpointed. kind: how they are parallel over two ranks; "single" for not at all."""

    def __init__(
        self, kind: str, policy: Any, engine: str = "tape", width: int = 16, head: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        affine = kind in ("single", "plain", "sequence")
        self.blocks = torch.nn.ModuleList(Block(affine, width, head) for _ in range(layers))
        self.kind, self.policy, self.engine = kind, policy, engine
        self.mesh = init_device_mesh("cpu", (2,))
        if not kind.startswith("single"):
            for block in self.blocks:
                parallelize_module(block, self.mesh, _plan(kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sequence":
            x = x.chunk(2, 1)[dist.get_rank()]
        if self.kind == "hidden":
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        for block in self.blocks:
            x = support.run_checkpointed(block, x, policy=self.policy, engine=self.engine)
        if self.kind == "sequence":
            x = DTensor.from_local(x, self.mesh, [Shard(1)])
        return x.full_tensor() if isinstance(x, DTensor) else x
