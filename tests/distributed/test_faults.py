"""One rank fails: the others end with an error within the time limit of the group, and that rank names the cause."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import fastac
from tests import support
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, sharded_inside, ulysses_stack
from tests.support import stack, stack_inputs

LIMIT = 2.5
"""Seconds that a collective waits, in these tests."""

SLACK = 30.0
"""Seconds for all else: starting, and a machine that is busy."""


class Failing(torch.nn.Module):
    """Raises, or ends its process, in a call on rank 1. Calls of a recompute count."""

    def __init__(self, what: str, call: int) -> None:
        super().__init__()
        self.what = what
        self.left = call

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == 1:
            if self.what == "leaves":
                os._exit(9)
            raise ValueError("the disk of this rank is full")
        return tensor


FORWARD, RECOMPUTE = 2, 3
"""Of two layers' calls: the second in the forward, the first in recompute."""


def _train(what: str, call: int) -> None:
    model = ulysses_stack()
    failing = Failing(what, call)
    for block in model.blocks:
        block.norms[2] = torch.nn.Sequential(failing, block.norms[2])
    fastac.enable(model, blocks="blocks")
    for _ in range(2):
        support.loss_of(model(**part_of_inputs())).backward()


@pytest.mark.parametrize(("what", "call"), [("raises", FORWARD), ("leaves", RECOMPUTE)])
def test_the_others_end_in_time(what: str, call: int) -> None:
    first, second = ranks.outcomes(_train, what, call, timeout=LIMIT, patience=LIMIT + SLACK)
    assert "RuntimeError" in first.error, f"rank 0 did not notice: {first.error!r}"
    assert ("ValueError: the disk of this rank is full" if what == "raises" else "exit code 9") in second.error


def _refused_on_one_rank() -> str:
    """FSDP2 units inside blocks gather while a block runs: rank 1 must find its error without a rerun."""
    model: Any = stack()
    if dist.get_rank() == 1:
        for block in model.blocks:
            block.attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.1)
    wrapped = sharded_inside(model)
    fastac.enable(model, blocks="blocks")
    try:
        support.loss_of(wrapped(**stack_inputs(seed=dist.get_rank()))).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_fastac_on_one_rank_ends_all_in_time() -> None:
    found = ranks.outcomes(_refused_on_one_rank, timeout=LIMIT, patience=LIMIT + SLACK)
    first, second = ranks.results(found)
    assert first.startswith("RuntimeError: "), "rank 0 waits for rank 1 in vain"
    assert second.startswith("PolicyNotAppliedError: rank 1 of 2: ")
    assert "blocks.0" in second


# Recompute that differs from rank to rank


def _reduced_behind(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Only rank 0 needs the sum for its backward: the recompute of rank 1 stops before it."""
    query, key = (tensor.unflatten(-1, (2, -1)).transpose(1, 2) for tensor in (video, text))
    own = F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)
    summed = functional.wait_tensor(functional.all_reduce(own.detach(), "sum", dist.group.WORLD))
    return own * summed if dist.get_rank() == 0 else own + summed


def _diverge(policy: str) -> str:
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in stack_inputs().items()}
    output = support.run_checkpointed(_reduced_behind, *inputs.values(), policy=policy)
    try:
        support.loss_of(output).backward()
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_recompute_different_amounts_complete() -> None:
    """torch's checkpointing issues the sum again on one rank alone. Saved, no rank issues it."""
    full = ranks.results(ranks.outcomes(_diverge, "torch", timeout=LIMIT))
    assert any(full), "the case shows nothing: full checkpointing gets through as well"
    assert ranks.run(_diverge, "attn_only") == ["", ""]
