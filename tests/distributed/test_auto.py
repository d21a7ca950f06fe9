"""policy="auto" on several ranks: they choose alike, and none waits for a rank that does not come."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.hook import enabled_on
from fastac.planning import auto
from fastac.planning.device_memory import DeviceMemory
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, sharded, ulysses_stack
from tests.support import stack, stack_inputs


def _choices(kind: str, forwards: tuple[int, int], wait: float = 240) -> list[dict[str, str]]:
    """What each of so many steps chose, on a rank with much memory and another with little.

    forwards: of each rank. wait: seconds for which a rank waits for the other one in its third forward.
    """
    model, inputs = stack(layers=3), stack_inputs(batch=1 + dist.get_rank() * (kind == "ddp"))
    forecast = fastac.plan(model, inputs, blocks="blocks", gpus=2 if kind == "fsdp2" else 1).forecast
    full, most = (forecast.peak(policy) - forecast.states.weights for policy in ("full", "attn_only"))
    room = 10 * most if dist.get_rank() == 0 else (full + most) // 2
    memory = DeviceMemory(0, math.ceil(room / (1 - auto.RESERVE)), 0)  # of a device whose allocator knows weights alone
    chosen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "memory_of", lambda device: memory)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        fastac.enable(model, fastac.Auto(host=0), blocks="blocks")
        wrappers: dict[str, Any] = {"ddp": DistributedDataParallel, "fsdp2": sharded}
        trained = wrappers.get(kind, lambda model: model)(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        for number in range(forwards[dist.get_rank()]):
            patch.setattr(auto, "WAIT", timedelta(seconds=wait if number == 2 else 240))
            trained(**inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            enabled = enabled_on(model)
            chosen.append({name: str(enabled.policy_of(block)) for name, block in enabled.blocks.items()})
    return chosen


def test_ranks_with_other_shapes() -> None:
    """Inputs of rank 1 are larger in every step. Both plan with the memory of rank 1."""
    first, second = ranks.run(_choices, "ddp", (3, 3))
    assert len(first) == len(second) == 3
    assert "none" not in second[0].values()


def test_a_rank_that_does_not_come_and_the_next_model() -> None:
    """One has no more data after two steps. The other one goes on, and waits once: for a second, here."""
    first, second = ranks.run(_choices, "alone", (4, 2), 1.0)
    assert first[:2] == second
    assert len(first) == 4
    # The next model does not meet what the first one left in the store. The smallest memory counts.
    much, little = ranks.run(_choices, "fsdp2", (3, 3))
    assert much == little
    assert {"none", "attn_only"}.isdisjoint(much[0].values())


def _planned_and_saved() -> tuple[int, int]:
    model, inputs = ulysses_stack(layers=3), part_of_inputs()
    planned = fastac.plan(model, inputs, blocks="blocks").policies[3]
    fastac.enable(model, blocks="blocks")
    model(**inputs)
    (row,) = fastac.report(model).rows
    return planned.saved_bytes, row.saved_bytes + row.communication.saved_bytes


def test_collectives_are_planned() -> None:
    """Ulysses saves the outputs of its exchanges with those of attention."""
    for planned, saved in ranks.run(_planned_and_saved):
        assert planned == saved
