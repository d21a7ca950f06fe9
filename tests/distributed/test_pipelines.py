"""Several micro-batches in flight: forwards of some between the forward and the backward of others, on stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.profiler import ProfilerActivity, profile

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.training import POLICIES, Warnings, assert_close
from tests.marks import slow
from tests.support import Tensors, assert_same, stack, stack_inputs

LAYERS, MICRO_BATCHES = 4, 4
CALLS = 2 * MICRO_BATCHES
"""Attention calls that a block makes in one step."""

SCHEDULES = {
    "two forwards": "F0 F1 B1 B0 F2 F3 B2 B3",
    "one forward, one backward": "F0 F1 B0 F2 B1 F3 B2 B3",
    "all forwards": "F0 F1 F2 F3 B0 B1 B2 B3",
    "last one first": "F0 F1 F2 F3 B3 B2 B1 B0",
}


class Stage(torch.nn.Module):
    """Some blocks of a stack. checkpoints: whether it calls fastac.checkpoint itself, else it is enabled."""

    def __init__(self, blocks: list[torch.nn.Module], policy: str, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.policy = policy if checkpoints else "none"
        if policy != "none" and not checkpoints:
            fastac.enable(self, policy, blocks="blocks")

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = support.run_checkpointed(block, video, text, policy=self.policy)
        return video


def stages(count: int, policy: str, checkpoints: bool = False) -> list[Stage]:
    blocks = list(stack(layers=LAYERS).blocks)
    size = LAYERS // count
    return [Stage(blocks[i * size : (i + 1) * size], policy, checkpoints) for i in range(count)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = stack_inputs(batch=MICRO_BATCHES)
    return inputs["video"].detach(), inputs["text"].detach()


def loss_of(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().mean()


def alone() -> Tensors:
    """One process with the whole batch."""
    [stage] = stages(1, "none")
    video, text = batch()
    loss = loss_of(stage(video, text), video)
    loss.backward()
    return {"loss": loss.detach()} | support.gradients(dict(stage.named_parameters()))


@pytest.mark.parametrize("checkpoints", [False, True], ids=["enable", "checkpoint"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_by_hand(schedule: str, checkpoints: bool, attention_executions: Counter[str]) -> None:
    """Two stages in one process: a backward of a stage gets the gradient that the next has for its input."""

    def run(policy: str) -> tuple[Tensors, list[int]]:
        both = stages(2, policy, checkpoints)
        videos, texts = (tensor.split(1) for tensor in batch())
        open_: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        found: Tensors = {}
        ran = [0, 0]
        for action in schedule_of(schedule):
            support.executions.clear()
            kind, number = action[0], action[1:]
            if kind == "F":
                video, text = videos[int(number)], texts[int(number)]
                middle = both[0](video, text)
                received = middle.detach().requires_grad_()
                loss = loss_of(both[1](received, text), video) / MICRO_BATCHES
                found[f"loss {number}"] = loss.detach()
                open_[number] = [(loss, torch.ones(())), (middle, received)]
            else:
                (loss, one), (middle, received) = open_.pop(number)
                loss.backward(one)
                middle.backward(received.grad)
            ran[kind == "B"] += support.executions[support.CPU_ATTENTION]
        found |= {
            f"{i}: {name}": t
            for i, stage in enumerate(both)
            for name, t in support.gradients(dict(stage.named_parameters())).items()
        }
        return found, ran

    support.count_cpu_attention()
    plain, _ = run("none")
    for policy, again in (("full", LAYERS * CALLS), ("attn_only", 0)):
        found, ran = run(policy)
        assert_same(found, plain)
        assert ran == [LAYERS * CALLS, again]


def schedule_of(name: str) -> list[str]:
    return SCHEDULES[name].split()


Schedule = Callable[..., Any]


def in_parallel(kind: Schedule, of_each: int, policy: str, checkpoints: bool) -> tuple[Tensors, list[int], list[str]]:
    """One step of this rank's stages: losses and gradients by the name in the whole stack; attention that ran."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * of_each
    video, text = batch()
    with Warnings() as warnings:
        mine = {i: stage for i, stage in enumerate(stages(count, policy, checkpoints)) if i % world == rank}
        pipeline = [PipelineStage(stage, i, count, torch.device("cpu")) for i, stage in mine.items()]
        schedule = kind(pipeline if of_each > 1 else pipeline[0], MICRO_BATCHES, loss_fn=loss_of)
        losses: list[torch.Tensor] = []
        first = {0: (video,)}.get(min(mine), ())
        target = video if max(mine) == count - 1 else None
        schedule.step(*first, text=text, target=target)  # learns shapes by a forward
        for stage in mine.values():
            stage.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            schedule.step(*first, text=text, target=target, losses=losses)
    size = LAYERS // count
    found = {"loss": torch.stack(losses).mean().detach()} if losses else {}
    for i, stage in mine.items():
        for number, block in enumerate(stage.blocks):
            for name, parameter in block.named_parameters():
                found[f"gradient of blocks.{i * size + number}.{name}"] = steps.whole(parameter.grad)
    return found, steps._runs(profiled, support.CPU_ATTENTION), list(warnings)


def each_policy(kind: Schedule, of_each: int, checkpoints: bool, policies: Sequence[str] = POLICIES) -> Any:
    return {policy: in_parallel(kind, of_each, policy, checkpoints) for policy in policies}


@pytest.mark.parametrize("checkpoints", [False, *slow(True)], ids=["enable", "checkpoint"])
@pytest.mark.parametrize(
    ("kind", "of_each"),
    [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)],
)
def test_schedules_of_torch(tmp_path: Path, kind: Schedule, of_each: int, checkpoints: bool) -> None:
    found = ranks.run(tmp_path, each_policy, kind, of_each, checkpoints)
    calls = LAYERS * CALLS // 2
    expected = alone()
    together: Tensors = {}
    for rank in found:
        plain, ran, _ = rank["none"]
        together |= plain
        assert ran == calls
        for policy, (tensors, ran, warnings) in rank.items():
            assert_same(tensors, plain)
            assert ran == (2 * calls if policy == "full" else calls), policy
            assert not warnings
    assert_close(together, expected, 1e-5)


@pytest.mark.slow
def test_zero_bubbles(tmp_path: Path) -> None:
    """The gradients of weights are computed one by one later, for each of which a checkpoint recomputes all again.

    What was saved is gone by then, which is an error.
    """
    for rank in ranks.run(tmp_path, each_policy, ScheduleInterleavedZeroBubble, 2, False, ("none", "full")):
        assert_same(rank["full"][0], rank["none"][0])
        assert rank["full"][1] > 3 * rank["none"][1]
    for outcome in ranks.outcomes(tmp_path, each_policy, ScheduleInterleavedZeroBubble, 2, False, ("attn_only",)):
        assert "FastacError" in outcome.error
        assert "backpropagated already" in outcome.error
        assert "(zero bubble)" in outcome.error
