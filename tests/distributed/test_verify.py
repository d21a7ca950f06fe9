"""fastac.verify on several ranks: it holds on all or fails on all, and all take the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastac
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, sharded, ulysses, ulysses_stack
from tests.ways.recipes import WAN, build

LIMIT = 3.0


def _verify(kind: str, per_block: bool = False) -> tuple[Any, ...]:
    if kind == "ulysses":
        found = fastac.verify(ulysses_stack(), blocks="blocks", **part_of_inputs())
    else:
        model, batch = build(WAN)
        model = {"fsdp2": sharded, "ddp": DistributedDataParallel}[kind](model)
        found = fastac.verify(model, per_block=per_block, **batch)
    return found.compared > 20, found.different, found.policy_executions, found.saved


@pytest.mark.parametrize(("kind", "per_block"), [("fsdp2", False), ("fsdp2", True), ("ddp", False), ("ulysses", False)])
def test_it_holds(kind: str, per_block: bool) -> None:
    assert ranks.run(_verify, kind, per_block) == [(True, (), (4, 0), 4)] * 2


class Noisy(torch.nn.Module):
    """On rank 1 it adds another small number in every call, as kernels that are not deterministic."""

    calls = 0

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor + 1e-6 * (self.calls % 7) if dist.get_rank() == 1 else tensor


def _through_all(model: Any, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[:-1]:
        video = block(video, text)
    return model.blocks[-1](video)  # last: other ranks get nothing of it


def _verify_noisy() -> float:
    model: Any = ulysses_stack()
    model.blocks.append(Noisy())
    model.forward = _through_all.__get__(model)
    return fastac.verify(model, blocks=list(model.blocks[:-1]), **part_of_inputs()).noise


def test_every_rank_takes_the_same_steps() -> None:
    """If one rank sees a difference, all run the step that measures the noise."""
    quiet, noise = ranks.results(ranks.outcomes(_verify_noisy, timeout=LIMIT))
    assert (quiet, noise > 0) == (0.0, True)


class Refusing(torch.autograd.Function):
    """Its backward is not deterministic, and raises if it should be."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if torch.get_deterministic_debug_mode() == 2:
            raise RuntimeError("refusing_cuda does not have a deterministic implementation")
        return gradient * (1 + 1e-6 * torch.rand(gradient.shape, generator=NOISE))


NOISE = torch.Generator()


def _verify_then_train(kind: str) -> tuple[bool, bool]:
    model, batch = build(WAN)
    model.blocks[0].ffn.register_forward_hook(lambda module, args, output: Refusing.apply(output))
    model = {"fsdp2": sharded, "ddp": DistributedDataParallel}[kind](model)
    inner = getattr(model, "module", model)
    fastac.enable(inner)
    found = fastac.verify(model, **batch)

    def step() -> float:
        model.zero_grad()
        model(**batch)[0].square().mean().backward()
        return sum(float(getattr(p.grad, "_local_tensor", p.grad).double().square().sum()) for p in model.parameters())

    first, second = step(), step()
    return "within the noise" in str(found), abs(first - second) < 1e-3 * first


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_no_step_ends_in_the_middle_of_a_backward(kind: str) -> None:
    """As one under deterministic algorithms may, which would leave the wrapper in it."""
    assert ranks.run(_verify_then_train, kind) == [(True, True)] * 2


def _decomposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ulysses(query, key, value, dropout_p=0.5 if dist.get_rank() == 1 else 0.0)


def _raising(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("this rank's own")
    return ulysses(query, key, value)


def _verify_failing(attend: Callable[..., torch.Tensor]) -> tuple[str, str]:
    model: Any = ulysses_stack()
    for block in model.blocks:
        block.attend = attend
    try:
        fastac.verify(model, blocks="blocks", **part_of_inputs())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("attend", "raised", "elsewhere", "cause"),
    [
        (_decomposed, "PolicyNotAppliedError", "PolicyNotAppliedError", "blocks.0"),
        (_raising, "ValueError", "FastacError", "this rank's own"),
    ],
)
def test_it_fails_on_all_where_it_fails_on_one(attend: Any, raised: str, elsewhere: str, cause: str) -> None:
    """Rank 0 waits in an exchange of the model until its limit, and then names the cause, too."""
    first, second = ranks.results(ranks.outcomes(_verify_failing, attend, timeout=LIMIT))
    assert (first[0], second[0]) == (elsewhere, raised)
    assert first[1].startswith("rank 0 of 2: ")
    assert "rank 1 of 2: " in first[1]
    assert cause in first[1]
    assert cause in second[1]


def _unequal() -> str:
    model, batch = build(WAN)
    if dist.get_rank() == 1:
        del model.blocks[1]  # type: ignore[index, union-attr]
    try:
        fastac.verify(model, per_block=True, **batch)
    except fastac.FastacError as error:
        return str(error)
    return ""


def test_unequal_numbers_of_blocks() -> None:
    for rank, message in enumerate(ranks.run(_unequal)):
        assert f"rank {rank} of 2" in message
        assert "different numbers of blocks" in message
