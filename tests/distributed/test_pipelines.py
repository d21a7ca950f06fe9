"""Several micro-batches in flight: forwards of some between the forward and the backward of others, on stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.profiler import ProfilerActivity, profile

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.support import AttentionStack, Tensors, assert_same, stack, stack_inputs

LAYERS, MICRO_BATCHES = 4, 4
CALLS = 2 * MICRO_BATCHES
"""Attention calls that a block makes in one step."""


def stages(count: int, policy: str) -> list[AttentionStack]:
    """A stack in so many parts."""
    blocks, made = list(stack(layers=LAYERS).blocks), []
    for _ in range(count):
        made.append(AttentionStack(layers=0))
        made[-1].blocks.extend(blocks.pop(0) for _ in range(LAYERS // count))
        if policy != "none":
            fastac.enable(made[-1], policy, blocks="blocks")
    return made


def in_parallel(kind: Callable[..., Any], of_each: int, policy: str) -> tuple[Tensors, int, list[str]]:
    """One step of this rank's stages: losses and gradients, attention that ran, warnings."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * of_each
    video, text = (tensor.detach() for tensor in stack_inputs(batch=MICRO_BATCHES).values())
    with steps.logged(logging.WARNING) as warnings:
        mine = {i: stage for i, stage in enumerate(stages(count, policy)) if i % world == rank}
        pipeline = [PipelineStage(stage, i, count, torch.device("cpu")) for i, stage in mine.items()]
        schedule = kind(pipeline if of_each > 1 else pipeline[0], MICRO_BATCHES, loss_fn=F.mse_loss)
        losses: list[torch.Tensor] = []
        first = {0: (video,)}.get(min(mine), ())
        target = video if max(mine) == count - 1 else None
        schedule.step(*first, text=text, target=target)  # learns shapes by a forward
        for stage in mine.values():
            stage.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            schedule.step(*first, text=text, target=target, losses=losses)
    found = {f"loss {number}": loss.detach() for number, loss in enumerate(losses)}
    leaves = {f"{i}.{name}": one for i, stage in mine.items() for name, one in stage.named_parameters()}
    return found | support.gradients(leaves), steps.runs(profiled), list(warnings)


def each_policy(kind: Callable[..., Any], of_each: int) -> Any:
    return {policy: in_parallel(kind, of_each, policy) for policy in ("none", "full", "attn_only")}


@pytest.mark.parametrize(
    ("kind", "of_each"),
    [
        (ScheduleGPipe, 1),
        (Schedule1F1B, 1),
        (ScheduleInterleaved1F1B, 2),
        pytest.param(ScheduleInterleavedZeroBubble, 2, marks=pytest.mark.slow),
    ],
)
def test_schedules_of_torch(kind: Callable[..., Any], of_each: int) -> None:
    calls = LAYERS * CALLS // 2
    for rank in ranks.run(each_policy, kind, of_each):
        plain = rank["none"][0]
        for policy, (tensors, ran, warnings) in rank.items():
            assert_same(tensors, plain)
            if policy == "full":  # zero bubble goes through a block's graph many times
                assert ran > 2 * calls if kind is ScheduleInterleavedZeroBubble else ran == 2 * calls
            else:
                assert ran == calls, policy
            assert not warnings
