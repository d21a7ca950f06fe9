"""Blocks with one attention, what tests do to its output, and the assertion that a policy changes no gradient."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.live_bytes import allocated
from tests.support import stack, stack_inputs, train_step

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

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(video).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        output = self.attend(*heads)
        if self.change is not None:
            output = self.change(output)
        return self.out(output.transpose(1, 2).flatten(2))


class RegionInside(torch.nn.Module):
    """A block that checkpoints a part of itself; it is checkpointed as a whole, too."""

    before = staticmethod(torch.tanh)

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.inner = support.AttentionBlock()
        self.after = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(support.WIDTH, support.WIDTH))
        self.policy = policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.after(support.run_checkpointed(self.inner, self.before(video), text, policy=self.policy))


def assert_exact(
    block: Callable[[], torch.nn.Module],
    counts: Counter[str] | None = None,
    again: int = 0,
    policy: str | fastac.Policy = "attn_only",
    backward: Callable[..., Any] | None = None,
    **inputs_options: Any,
) -> None:
    """Two layers of a block train as without checkpointing. counts, again: as in `support.assert_alike`."""
    inputs = stack_inputs(**inputs_options)
    model = functools.cache(lambda policy: stack(block=block, policy=policy))
    support.assert_alike(lambda policy: train_step(model(policy), inputs, backward=backward), counts, again, policy)


def held_bytes(block: torch.nn.Module, policy: Any) -> tuple[int, int, int]:
    """Bytes that a region holds after its forward, its output not counted; after a backward; and once it was dropped.

    Also in the first region of its kind, which is watched.
    """

    def forward(**inputs: torch.Tensor) -> torch.Tensor:
        # Without the generator's state, which torch keeps for each region.
        return fastac.checkpoint(block, *inputs.values(), policy=policy, preserve_rng_state=False)

    def held(**inputs: torch.Tensor) -> int:
        return allocated(lambda: forward(**inputs)) - inputs["video"].nbytes

    def step() -> None:
        support.loss_of(forward(**inputs)).backward()

    def dropped() -> None:
        forward(**inputs)

    inputs = stack_inputs()
    step()
    assert 2 * held(**inputs) == held(**stack_inputs(batch=2)), "another kind"
    return held(**inputs), allocated(step), allocated(dropped)


def add_one(output: torch.Tensor) -> torch.Tensor:
    return output.add_(1)


def add_one_to_a_view(output: torch.Tensor) -> torch.Tensor:
    output.transpose(1, 2)[:, :3].add_(1)
    return output


def add_one_without_grad(output: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return output.add_(1)


CHANGES: tuple[Change, ...] = (add_one, add_one_to_a_view, add_one_without_grad)
"""In-place changes of an output."""


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()
