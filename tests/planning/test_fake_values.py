"""Values of small inputs in a plan: a model may ask for them, and for what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastac
from fastac import FastacError
from tests.planning.planned import stack_inputs
from tests.support import AttentionStack

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]])


class Asks(AttentionStack):
    """A stack that asks for something before its blocks run."""

    def __init__(self, ask: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.ask, self.unknown = ask, torch.nn.Parameter(torch.ones(2, 5, 7))

    def forward(self, video: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        FOUND.append(self.ask(mask, self.unknown.detach()))
        return super().forward(video, text)


FOUND: list[Any] = []
"""What models found, in simulations too: those run copies of them."""


def asked(ask: Callable[[torch.Tensor, torch.Tensor], Any], mask: torch.Tensor = MASK, **options: Any) -> Any:
    """What a model finds in a plan; the values of `mask` are known, those of weights are not."""
    FOUND.clear()
    fastac.plan(Asks(ask), {**stack_inputs(), "mask": mask}, blocks="blocks", **options)
    assert all(found == FOUND[0] for found in FOUND)
    return FOUND[0]


def places(mask: torch.Tensor, features: torch.Tensor) -> list[Any]:
    """Their number is a shape: of what a mask picks, and of its places."""
    picked = [features[mask].shape, features[:, mask[0]].shape, mask.nonzero().shape]
    return [*map(tuple, picked), *(len(of_one) for of_one in mask[0].nonzero(as_tuple=True))]


def of_constants(mask: torch.Tensor, unknown: torch.Tensor) -> tuple[int, int]:
    return int((torch.arange(5) * mask[0]).max()), int(torch.full((2,), 3).sum() + torch.zeros(1, dtype=torch.int64))


def of_a_shape(mask: torch.Tensor, unknown: torch.Tensor) -> list[int]:
    alike = torch.zeros_like(unknown), torch.ones_like(unknown), unknown.new_full((2, 3), 7)
    return [int(one.sum()) for one in alike]


def in_place(mask: torch.Tensor, unknown: torch.Tensor) -> int:
    row = mask.clone()[0]
    row.add_(1)
    return int(row.sum())


def test_what_follows_from_inputs_is_known() -> None:
    """Through several operations, constants and shapes. Of one in place, too, as views of it are."""
    assert asked(lambda mask, _: mask.sum(dim=1).tolist()) == [3, 1]
    assert asked(of_constants) == (3, 6)
    assert asked(of_a_shape) == [0, 70, 42]
    assert asked(places, MASK.bool()) == [(4, 7), (2, 3, 7), (4, 2), 3]
    assert asked(in_place) == 8


def test_an_input_that_is_changed_stays_as_it_is() -> None:
    given = MASK.clone()
    assert asked(lambda mask, _: int(mask.add_(1)[0].sum()) - int(mask[1].sum()), given) == 2
    assert torch.equal(given, MASK)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask, unknown: unknown.sum().item(),
        lambda mask, unknown: (unknown[..., 0] + mask).sum().item(),
        lambda mask, unknown: mask.copy_(unknown[..., 0]).sum().item(),
        lambda mask, unknown: torch.empty_like(mask).sum().item(),
    ],
)
def test_what_depends_on_other_values_is_not_known(ask: Callable[..., Any]) -> None:
    """Nor what is changed in place by them."""
    with pytest.raises(FastacError, match=r"does not run without data"):
        asked(ask)


def test_values_that_a_cpu_does_not_compute() -> None:
    """Kernels of CUDA on known values: their results are not known."""
    half = torch.ones(2, 4, dtype=torch.float16)
    assert asked(lambda mask, _: (mask + 1).sum().item(), half, device="cuda") == 16
    for ask in (
        lambda mask, _: mask.softmax(-1, dtype=torch.float32).sum().item(),
        lambda mask, _: torch.nn.functional.rms_norm(mask, (4,)).sum().item(),
    ):
        with pytest.raises(FastacError, match=r"does not run without data"):
            asked(ask, half, device="cuda")
