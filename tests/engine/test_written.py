"""Tensors that are written in place where autograd would notice: in a backward, and before one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

import fastac
from tests import support
from tests.engine.cases import OneAttention
from tests.support import VIDEO_TOKENS, WIDTH, AttentionBlock, stack_inputs

POLICIES = ["attn_only", "full"]
of_policies = pytest.mark.parametrize("policy", POLICIES)


class WritingBackward(torch.autograd.Function):
    """Multiplies. Its backward writes the gradient into a tensor that it saved, as fused losses and gates do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, gate)
        return hidden * gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, gate = ctx.saved_tensors
        of_gate = grad * hidden
        return grad * gate, gate.copy_(of_gate)


def gated(output: torch.Tensor) -> torch.Tensor:
    """Through a gate whose sigmoid needs its result in backward."""
    return WritingBackward.apply(output, output.sigmoid())  # type: ignore[no-any-return, no-untyped-call]


@of_policies
def test_a_backward_that_writes_what_another_saved(policy: str) -> None:
    """An error, as without checkpointing: autograd compares versions, and so does a region."""
    block = OneAttention(change=gated)
    inputs = stack_inputs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        support.loss_of(block(**inputs)).backward()
    for _ in range(2):  # the first region of its kind is watched
        loss = support.loss_of(fastac.checkpoint(block, **inputs, policy=policy))
        with pytest.raises(CheckpointError, match="written in place") as caught:
            loss.backward()
        assert isinstance(caught.value, fastac.FastacError)
        assert len(str(caught.value).splitlines()) <= 5


# Inputs that are no tensors by position


class Rotated(AttentionBlock):
    """Multiplied by what diffusers gives as (cos, sin). May write its cache, as autoregressive models do."""

    def forward(self, video: Any, text: Any, rotary: Any = None, cache: Any = None, number: int = 0) -> torch.Tensor:
        rotary = rotary.angles if isinstance(rotary, Angles) else rotary
        cos, sin = rotary if isinstance(rotary, tuple) else rotary["angles"]
        if cache is not None:
            cache[number][:, : video.shape[1]] = video.detach()
            video = video + cache[number][:, : video.shape[1]]
        return super().forward(video * cos + video.flip(-1) * sin, text)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.linspace(0, 1, VIDEO_TOKENS)[:, None]
    return angle.cos(), angle.sin()


@dataclasses.dataclass
class Angles:
    angles: Any


WAYS: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "in a dataclass": lambda pair: ((Angles(pair),), {}),
    "in a mapping": lambda pair: ((collections.UserDict(angles=pair),), {}),
    "in a tuple": lambda pair: ((pair,), {}),
    "in a list in a dict": lambda pair: (({"angles": list(pair)},), {}),
    "by keyword": lambda pair: ((), {"rotary": pair}),
}


@of_policies
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [0, 3], ids=["compared", "not compared"])
def test_an_input_that_is_written_before_backward(step: int, way: str, policy: str) -> None:
    """Also in a step that compares no values."""
    block, inputs, pair = Rotated(), stack_inputs(), angles()
    args, kwargs = WAYS[way](pair)

    def loss() -> torch.Tensor:
        return support.loss_of(fastac.checkpoint(block, *inputs.values(), *args, policy=policy, **kwargs))

    for _ in range(step):
        loss().backward()
    last = loss()
    pair[1].mul_(2)
    message = "does not compute what the forward did" if step == 0 else "written in place between forward and backward"
    with pytest.raises(CheckpointError, match=message) as caught:
        last.backward()
    assert len(str(caught.value).splitlines()) <= 5
    loss().backward()


def test_an_input_that_is_written_where_no_values_are_compared() -> None:
    """In step 0, which compares them only with the generators restored."""
    inputs, pair = stack_inputs(), angles()
    output = fastac.checkpoint(Rotated(), **inputs, rotary=pair, preserve_rng_state=False)
    pair[1].mul_(2)
    with pytest.raises(CheckpointError, match=r"^Rotated: a tensor given by keyword"):
        output.sum().backward()


@of_policies
@pytest.mark.parametrize("given", ["its own", "that of all layers"])
def test_a_cache_that_the_blocks_write(given: str, policy: str) -> None:
    """Also when another block, or a later call, writes it before the backward: what a block reads stays."""
    inputs = stack_inputs()

    def step(policy: str) -> support.Tensors:
        blocks = support.stack(layers=2, block=Rotated).blocks
        cache = [torch.zeros(1, VIDEO_TOKENS, WIDTH) for _ in blocks]

        def call(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(blocks):
                own = {"cache": cache[number:]} if given == "its own" else {"cache": cache, "number": number}
                video = support.run_checkpointed(block, video, text, rotary=angles(), policy=policy, **own)
            return video

        return support.train_step(lambda **inputs: (call(**inputs), call(**inputs)), inputs)

    support.assert_alike(step, policy=policy, steps=4)


@of_policies
def test_containers_that_change(policy: str) -> None:
    """A tensor that is replaced, or that comes before others, is none that is written."""
    block, inputs = Rotated(), stack_inputs()
    for _ in range(4):
        given: dict[str, Any] = {"angles": angles(), "unread": [torch.zeros(2)]}
        output = fastac.checkpoint(block, *inputs.values(), given, policy=policy)
        given["unread"][0] = torch.zeros(2).add_(1)
        given["unread"].insert(0, torch.zeros(3).add_(1).add_(1))
        support.loss_of(output).backward()
