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
from fastac.engine import device_memory
from fastac.engine import ranks as ranks_of_engine
from fastac.engine.device_memory import DeviceMemory
from fastac.hook import enabled_on
from fastac.planning import auto
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, sharded, ulysses_stack
from tests.live_bytes import LiveBytes
from tests.support import stack, stack_inputs


def _choices(kind: str, forwards: tuple[int, int], wait: float = 240) -> list[dict[str, str]]:
    """What each of so many steps chose, on a rank with much memory and another with little.

    forwards: of each rank. wait: seconds for which a rank waits for the other one in its third forward.
    """
    is_ulysses = kind == "ulysses"
    model = ulysses_stack(layers=3) if is_ulysses else stack(layers=3)
    inputs = part_of_inputs() if is_ulysses else stack_inputs(batch=2 - dist.get_rank() if kind == "ddp" else 1)
    forecast = fastac.plan(model, inputs, blocks="blocks", gpus=2 if kind == "fsdp2" else 1).forecast
    full, most = (forecast.peak(policy) - forecast.states.weights for policy in ("full", "attn_only"))
    room = math.ceil((10 * most if dist.get_rank() == 0 else (full + most) // 2) / (1 - auto.RESERVE))
    chosen = []
    # Of a device whose allocator knows all but the weights.
    meter = LiveBytes([*model.parameters(), *model.buffers()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "memory_of", lambda device: DeviceMemory(meter.now, meter.peak))
        patch.setattr(device_memory, "usable_bytes", lambda device: room)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        fastac.enable(model, fastac.Auto(host=0), blocks="blocks")
        wrappers: dict[str, Any] = {"ddp": DistributedDataParallel, "fsdp2": sharded}
        trained = wrappers.get(kind, lambda model: model)(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        with meter:
            for number in range(forwards[dist.get_rank()]):
                patch.setattr(ranks_of_engine, "WAIT", timedelta(seconds=wait if number == 2 else 240))
                trained(**inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                enabled = enabled_on(model)
                chosen.append({name: str(enabled.policy_of(block)) for name, block in enabled.blocks.items()})
    return chosen


def test_ranks_with_other_shapes() -> None:
    """Inputs of rank 0 are larger in every step, and its memory. Both choose with the memory of rank 1."""
    first, second = ranks.run(_choices, "ddp", (4, 4))
    assert len(first) == len(second) == 4
    assert "none" not in first[-1].values()


def test_ranks_that_communicate_in_their_blocks() -> None:
    """They choose the same in every step, whatever each has measured. Else one waits for ever."""
    first, second = ranks.run(_choices, "ulysses", (6, 6))
    assert first == second
    assert first[0] != first[-1]


def test_a_rank_that_does_not_come_and_the_next_model() -> None:
    """One has no more data after two steps. The other one goes on, and waits once: for a second, here."""
    first, second = ranks.run(_choices, "alone", (4, 2), 1.0)
    assert first[:2] == second
    assert len(first) == 4
    # The next model does not meet what the first one left in the store. The smallest memory counts.
    much, little = ranks.run(_choices, "fsdp2", (4, 4))
    assert much == little
    assert "none" not in much[-1].values()


def _error_of_a_small_rank() -> str:
    model, inputs = stack(layers=1), stack_inputs()
    memory = 10**9 if dist.get_rank() == 0 else 10**3
    fastac.enable(model, fastac.Auto(memory=memory, host=0), blocks="blocks")
    with pytest.raises(fastac.errors.NothingFitsError) as raised:
        model(**inputs)
    return str(raised.value)


def test_every_rank_says_which_one_has_too_little() -> None:
    for number, said in enumerate(ranks.run(_error_of_a_small_rank)):
        assert said.startswith(
            f'rank {number} of 2: policy "auto", rank 1 of 2: the first step would run out of memory'
        )


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
