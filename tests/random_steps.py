"""Ways to make one training step: what is done between a forward and the end of its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests import support
from tests.support import loss_of


@dataclasses.dataclass
class Step:
    """A model, what it was called with, other inputs of its kind, and how to disable fastac and enable it again."""

    model: torch.nn.Module
    batch: dict[str, Any]
    other: dict[str, Any]
    disable: Callable[[], None]
    enable: Callable[[], None]

    def leaves(self) -> list[torch.Tensor]:
        return list(support.leaves_of(self.model, self.batch).values())

    def again(self) -> torch.Tensor:
        return loss_of(self.model(**self.other))


def _twice(step: Step, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _accumulated(step: Step, loss: torch.Tensor) -> None:
    loss.backward()
    step.again().backward()


def _two_forwards(step: Step, loss: torch.Tensor) -> None:
    (loss + step.again()).backward()


def _later_first(step: Step, loss: torch.Tensor) -> None:
    step.again().backward()
    loss.backward()


def _dropped(step: Step, loss: torch.Tensor) -> None:
    step.again()
    loss.backward()


def _partial(step: Step, loss: torch.Tensor, chosen: slice = slice(0, None, 2)) -> None:
    leaves = step.leaves()[chosen]
    for leaf, gradient in zip(
        leaves, torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True), strict=True
    ):
        leaf.grad = gradient


def _halves(step: Step, loss: torch.Tensor) -> None:
    _partial(step, loss)
    _partial(step, loss, slice(1, None, 2))


def _penalty(step: Step, loss: torch.Tensor) -> None:
    leaves = step.leaves()[-3:]
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    (loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)).backward()


def _in_a_thread(step: Step, loss: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def _sampled_between(step: Step, loss: torch.Tensor) -> None:
    with torch.no_grad():
        step.model(**step.other)
    loss.backward()


def _switched_between(step: Step, loss: torch.Tensor) -> None:
    step.disable()
    loss.backward()
    step.enable()


def _hooked(step: Step, loss: torch.Tensor) -> None:
    handles = [leaf.register_hook(lambda gradient: gradient * 2) for leaf in step.leaves()[::3]]
    loss.backward()
    for handle in handles:
        handle.remove()


def _inside_a_region(step: Step, loss: torch.Tensor) -> None:
    loss_of(torch_checkpoint(step.model, use_reentrant=False, **step.other)).backward()
    loss.backward()


WAYS: dict[str, Callable[[Step, torch.Tensor], None]] = {
    "plain": lambda step, loss: loss.backward(),
    "twice": _twice,
    "accumulated": _accumulated,
    "two forwards": _two_forwards,
    "later first": _later_first,
    "dropped": _dropped,
    "partial": _partial,
    "halves": _halves,
    "penalty": _penalty,
    "in a thread": _in_a_thread,
    "sampled between": _sampled_between,
    "switched between": _switched_between,
    "hooked": _hooked,
    "inside a region": _inside_a_region,
    "saved on cpu": lambda step, loss: loss.backward(),
}

SECOND_BACKWARDS = ("twice", "halves", "partial")
"""Of these ways, those that go back through one region more than once."""
