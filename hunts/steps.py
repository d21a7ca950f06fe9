"""Ways to make one training step: what is done between a forward and the end of its backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from hunts.blocks import UserError
from tests import support
from tests.support import loss_of


@dataclasses.dataclass
class Step:
    """A model, what it was called with, and other inputs of its kind.

    without: makes a call while fastac is disabled; under_full: while the model is fully checkpointed.
    """

    model: torch.nn.Module
    batch: dict[str, Any]
    other: dict[str, Any]
    without: Callable[[Callable[[], object]], None]
    under_full: Callable[[Callable[[], object]], None]

    def leaves(self) -> list[torch.Tensor]:
        return list(support.leaves_of(self.model, self.batch).values())

    def again(self) -> torch.Tensor:
        return loss_of(self.model(**self.other))


def _twice(step: Step, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _later_first(step: Step, loss: torch.Tensor) -> None:
    step.again().backward()
    loss.backward()


def _penalty(step: Step, loss: torch.Tensor) -> None:
    leaves = step.leaves()[-3:]
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    (loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)).backward()


def _in_a_thread(step: Step, loss: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def _one_by_one(step: Step, loss: torch.Tensor) -> None:
    outputs = [t for t in step.model(**step.other) if isinstance(t, torch.Tensor) and t.requires_grad]
    for output in outputs:
        loss_of(output).backward(retain_graph=True)
    loss.backward()


def _interrupted(step: Step, loss: torch.Tensor) -> None:
    def interrupt(_: torch.Tensor) -> None:
        raise UserError

    leaves = step.leaves()
    handle = leaves[len(leaves) // 2].register_hook(interrupt)
    try:
        with contextlib.suppress(UserError):
            loss.backward()
    finally:
        handle.remove()
    for leaf in leaves:
        leaf.grad = None
    step.again().backward()


def _copied_between(step: Step, loss: torch.Tensor) -> None:
    copied = copy.deepcopy(step.model)
    loss.backward()
    loss_of(copied(**step.other)).backward()


def _inside_a_region(step: Step, loss: torch.Tensor) -> None:
    loss_of(torch_checkpoint(step.model, use_reentrant=False, **step.other)).backward()
    loss.backward()


WAYS: dict[str, Callable[[Step, torch.Tensor], None]] = {
    "plain": lambda step, loss: loss.backward(),
    "twice": _twice,
    "later first": _later_first,
    "penalty": _penalty,
    "in a thread": _in_a_thread,
    "disabled between": lambda step, loss: step.without(loss.backward),
    "switched between": lambda step, loss: step.under_full(loss.backward),
    "copied between": _copied_between,
    "one by one": _one_by_one,
    "interrupted": _interrupted,
    "inside a region": _inside_a_region,
    "saved on cpu": lambda step, loss: loss.backward(),
    "to the end": lambda step, loss: loss.backward(),
}

AROUND: dict[str, Callable[[], Any]] = {
    "saved on cpu": torch.autograd.graph.save_on_cpu,
    "to the end": lambda: set_checkpoint_early_stop(False),
}
"""What is open around the whole of a step, by the way it is made in."""
