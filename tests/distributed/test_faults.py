"""One rank fails: the others end with an error within the time limit of the group, and that rank names the cause."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

import fastac
from tests import support
from tests.distributed import ranks
from tests.distributed.models import sharded_inside
from tests.support import stack, stack_inputs

LIMIT = 2.5
"""Seconds that a collective waits, in these tests."""

SLACK = 30.0
"""Seconds for all else: starting, and a machine that is busy."""


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
