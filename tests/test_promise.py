"""What fastac promises, in numbers. Start here.

The model is a tiny Wan of diffusers with random weights. Each of its two blocks attends twice: to the video, which has
1,024 tokens, and to the text, which has 12. So a forward runs the attention kernel four times.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

import fastac
from tests import support
from tests.live_bytes import allocated

TOKENS, WIDTH, HEADS, FLOAT32 = 1024, 24, 2, 4

OUTPUT = TOKENS * (WIDTH + HEADS) * FLOAT32
"""Bytes of what one attention returns: its output, and the logsumexp of each head, which its backward needs."""

BY_BLOCK = {"blocks.0": "attn_only", "*": "full"}

PROMISE = [
    # policy, attention kernels: in the forward, in the backward; outputs of attention held from one to the other
    ("full", 4, 4, 0),
    ("long_attn_only", 4, 2, 2),
    (BY_BLOCK, 4, 2, 2),
    ("attn_only", 4, 0, 4),
]
"""The rest of a block is computed again. Under "none" it is not, and attention runs 4 times."""


class Step(NamedTuple):
    """Attention kernels in forward and backward, bytes that live from one to the other, and all that was computed.

    Kernels count themselves. Bytes are those of the allocator, as torch's profiler lists them.
    """

    forward: int
    backward: int
    held: int
    numbers: dict[str, torch.Tensor]


def step(policy: Any) -> Step:
    """A forward and a backward of a new model. policy: of fastac, "torch" for torch's own checkpointing, or None."""
    model, inputs = support.build("WanTransformer3DModel")
    generator = torch.Generator().manual_seed(0)
    inputs["hidden_states"] = torch.randn(1, 4, 4, 32, 32, generator=generator, requires_grad=True)
    if policy == "torch":
        model.enable_gradient_checkpointing()
    elif policy is not None:
        fastac.enable(model, policy)
    support.count_cpu_attention()
    support.executions.clear()
    made: list[torch.Tensor] = []
    held = allocated(lambda: made.extend(model(**inputs)))
    forward = support.executions.total()
    support.loss_of(made[0]).backward()
    numbers = {"output": made[0].detach()} | support.gradients(support.leaves_of(model, inputs))
    return Step(forward, support.executions.total() - forward, held, numbers)


without_fastac = functools.cache(step)
"""A step that several tests compare with."""


@pytest.mark.parametrize(("policy", "forward", "backward", "outputs"), PROMISE, ids=str)
def test_each_policy_runs_and_holds_what_it_says(policy: Any, forward: int, backward: int, outputs: int) -> None:
    """Held bytes are those beyond torch's checkpointing. A step computes what the model does without, bit for bit."""
    done = step(policy)
    assert (done.forward, done.backward) == (forward, backward)
    assert done.held - without_fastac("torch").held == outputs * OUTPUT
    support.assert_same(done.numbers, without_fastac(None).numbers)


def test_the_policies_are_in_order_between_full_and_none() -> None:
    """Whoever saves more holds more. "none" is the model as it was."""
    full, long, attention, none = (step(name).held for name in ("full", "long_attn_only", "attn_only", "none"))
    assert full < long < attention < none == without_fastac(None).held
    assert step("none")[:2] == without_fastac(None)[:2] == (4, 0)
