"""Tensor parallelism with DTensor: sums of partial results are saved, gathers of a sequence are issued again.

A redistribution that an op makes by itself, such as of a partial sum that is added to a replicated tensor, is seen by
the tape. Torch's selective checkpointing sees the op alone, and issues what is hidden in it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
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

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured

WIDTH, HEAD, TOKENS, LAYERS = 16, 4, 12, 2


class Attention(torch.nn.Module):
    """Self-attention of as many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v)]
        out: torch.Tensor = self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return out


class FeedForward(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(torch.nn.Module):
    """A transformer block, as the guides of tensor parallelism have it. affine: whether its norms have weights."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH, elementwise_affine=affine) for _ in range(2))
        self.attention, self.feed_forward = Attention(), FeedForward()

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


class Model(torch.nn.Module):
    """Blocks, each checkpointed. kind: how they are parallel; "single" for not at all."""

    def __init__(self, kind: str, policy: str, engine: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(kind in ("single", "plain", "sequence")) for _ in range(LAYERS))
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


class Did(NamedTuple):
    """A step, and the collectives as reported: issued, saved, again."""

    step: Measured
    numbers: tuple[int, int, int] | None


WAYS = {"none": ("none", ""), "full": ("torch", ""), "tape": ("attn_only", "tape"), "sac": ("attn_only", "sac")}


def _train(kind: str) -> dict[str, Did]:
    found = {}
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    single = Model("single hidden" if kind == "hidden" else "single", "none", "")
    found["single"] = Did(steps.measured(single, {"x": x}), None)
    for way, (policy, engine) in WAYS.items():
        model = Model(kind, policy, engine)
        step = steps.measured(model, {"x": x})
        with support.reported_blocks({f"blocks.{i}": block for i, block in enumerate(model.blocks)}):
            row = fastac.report(model).rows[0]
        assert not row.writing
        numbers = row.communication
        found[way] = Did(step, numbers and (numbers.issued, numbers.saved, numbers.again))
    return found


ISSUED = {
    "plain": ({"full": 2, "tape": 0, "sac": 0}, {"tape": (4, 4, 0), "sac": (4, 4, 0)}),
    "sequence": ({"full": 6, "tape": 4, "sac": 4}, {"tape": (8, 4, 4), "sac": (8, 4, 4)}),
    "hidden": ({"full": 3, "tape": 0, "sac": 3}, {"tape": (3, 3, 0), "sac": None}),
}
"""Kind -> collectives of the forward's that backward issues again, and what is reported: issued, saved, again.

Recompute ends with the last tensor that backward needs, which the last sum of a block is not. Of "hidden", the fourth
is outside the blocks.
"""


def check_tensor_parallel(folder: Path, kind: str) -> None:
    """Gradients are those of one process; what is saved is not issued again."""
    again, reported = ISSUED[kind]
    for found in ranks.run(folder, _train, kind):
        expected = found["single"].step.tensors
        for name, tensor in found["none"].step.tensors.items():
            largest = float(expected[name].abs().max())
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-5 * largest + 1e-6), name
        assert found["none"].step.tensors.keys() == expected.keys()
        plain = found["none"].step.collectives
        for way, (step, numbers) in found.items():
            if way == "single":
                continue
            support.assert_same(step.tensors, found["none"].step.tensors)
            assert step.attention == ((LAYERS, LAYERS) if way == "full" else (LAYERS, 0)), way
            assert step.collectives == (plain[0], plain[1] + again.get(way, 0)), f"{kind}, {way}: {step.backward}"
            assert numbers == reported.get(way), f"{way}: {numbers}"


@pytest.mark.parametrize("kind", ISSUED)
def test_tensor_parallel(tmp_path: Path, kind: str) -> None:
    check_tensor_parallel(tmp_path, kind)
