"""Ops of torch that go another way under fastac, or save what they have yet to write; tensors without a version."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.support import AttentionBlock, Tensors, run_checkpointed, stack_inputs

BATCH = 3


def transcribed(hidden: torch.Tensor) -> torch.Tensor:
    """Times a ctc_loss, which goes another way while a TorchDispatchMode is open."""
    targets = torch.arange(1, 5).repeat(BATCH, 1)
    lengths = [torch.full((BATCH,), length) for length in (hidden.shape[1], 4)]
    return hidden * F.ctc_loss(hidden.transpose(0, 1).log_softmax(-1), targets, *lengths)


def leaky(hidden: torch.Tensor) -> torch.Tensor:
    """Saves its noise before it draws it."""
    return F.rrelu(hidden, training=True)


def spectrum(hidden: torch.Tensor) -> torch.Tensor:
    """Writes into a view whose graph torch cannot make again."""
    changed = torch.fft.ifft(torch.fft.fft(hidden, dim=1) * 2, dim=1).real
    changed[..., 0] = 0
    return F.dropout(changed, 0.3)


def jittered(hidden: torch.Tensor) -> torch.Tensor:
    """Draws from a generator that torch does not have."""
    return hidden * random.random()


class WithOperation(AttentionBlock):
    """A block with an operation, before all else or after it."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], is_last: bool) -> None:
        super().__init__()
        self.operation, self.is_last = operation, is_last

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.is_last:
            return self.operation(super().forward(video, text))
        return super().forward(self.operation(video), text)


@pytest.mark.parametrize("determinism_check", ["default", "none"])
@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("operation", [transcribed, leaky, spectrum, jittered])
def test_operation(operation: Any, is_last: bool, policy: str, determinism_check: str) -> None:
    """In four steps, of which the last compares no values."""
    torch.manual_seed(0)
    block, inputs = WithOperation(operation, is_last), stack_inputs(batch=BATCH)

    def run(policy: str) -> Tensors:
        options: Any = {} if policy == "none" else {"determinism_check": determinism_check}
        random.seed(0)
        return support.train_step(lambda **inputs: run_checkpointed(block, policy=policy, **options, **inputs), inputs)

    support.assert_alike(run, policy=policy, steps=4)


def test_in_a_nested_region() -> None:
    """Its forward in the recompute of the outer one is under a mode, and so is its own recompute."""
    torch.manual_seed(0)
    block = WithOperation(transcribed, True)

    def run(policy: str) -> Tensors:
        inner = functools.partial(run_checkpointed, block, policy=policy)
        outer = functools.partial(run_checkpointed, lambda **inputs: inner(**inputs), policy=policy)
        return support.train_step(outer, stack_inputs(batch=BATCH))

    support.assert_alike(run)


def test_a_change_of_what_is_saved_last() -> None:
    """It belongs to no graph, as if its op had yet to write it: it is compared at the end."""
    table = [torch.ones(support.WIDTH)]
    output = fastac.checkpoint(lambda video: video * table[0], stack_inputs()["video"], policy="full")
    table[0] = table[0] * 2
    with pytest.raises(fastac.FastacError, match="does not compute what the forward did"):
        output.sum().backward()


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("way", ["buffer", "argument", "keyword", "in a tuple"])
def test_inference_tensors(way: str, policy: str) -> None:
    """They have no version: a table that was filled in validation."""
    torch.manual_seed(0)
    block = AttentionBlock()
    with torch.inference_mode():
        table = torch.randn(support.WIDTH)
    block.register_buffer("table", table)
    args, kwargs = {
        "buffer": ((), {}),
        "argument": ((table,), {}),
        "keyword": ((), {"one": table}),
        "in a tuple": (((table,),), {}),
    }[way]

    def function(video: torch.Tensor, text: torch.Tensor, one: Any = block.table) -> torch.Tensor:
        return block(video + (one[0] if isinstance(one, tuple) else one), text)  # type: ignore[no-any-return]

    def run(policy: str) -> Tensors:
        call = functools.partial(run_checkpointed, function, policy=policy, **kwargs)
        return support.train_step(lambda video, text: call(video, text, *args), stack_inputs())

    support.assert_alike(run, policy=policy)


@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_strided_nested_tensors(policy: str) -> None:
    """They have no shape: torch's own checkpoint raises an internal error."""
    torch.manual_seed(0)
    parts, projection = [torch.randn(length, 8) for length in (3, 5)], torch.nn.Linear(8, 8)

    def train(policy: str) -> list[torch.Tensor]:
        projection.zero_grad()
        nested = torch.nested.nested_tensor(parts, requires_grad=True)
        output = run_checkpointed(lambda x: projection(x.sin()) * x, nested, policy=policy)
        torch.nested.to_padded_tensor(output, 0.0).square().sum().backward()
        return [*nested.grad.unbind(), projection.weight.grad.clone()]

    expected = train("none")
    for _ in range(4):
        assert all(map(torch.equal, train(policy), expected))
