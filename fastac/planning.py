"""What every policy holds and recomputes, before training: bytes and FLOPs of a step, without weights or GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastac import budget
from fastac.errors import FastacError
from fastac.events import Split
from fastac.forecast import Forecast
from fastac.plans import Plan, PolicyPlan, States
from fastac.policy import NAMED, Policy
from fastac.errors import class_name
from fastac.sizes import parse_bytes
from fastac.subjects import BREAKS, Subject, subject

OPTIMIZERS: Mapping[str, Callable[[int], float]] = {
    "adamw": lambda size: 2 * size,
    "adamw8bit": lambda size: 2 * (1 + 4 / 256),
    "sgd": lambda size: 0,
}
"""Optimizer -> bytes of state for a trained number of so many bytes. 8 bits: with an fp32 scale for 256 of them, as
bitsandbytes has it."""

EVERY_SECOND = "ops"
"""torchtitan's selective checkpointing by op: attention, and every second matrix product."""


MIB = 2**20


def states_of(model: torch.nn.Module, optimizer: str = "adamw", gpus: int = 1, blocks: Sequence[Any] = ()) -> States:
    """What a model and its optimizer hold on each of several GPUs, which FSDP2 gives equal parts of the parameters.

    Of the blocks two are gathered at a time, the one that runs and the next, and the gradients of one are whole.
    Raises FastacError for an optimizer that is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise FastacError(f"plan(optimizer={optimizer!r}): there are {', '.join(OPTIMIZERS)}")
    if gpus < 1:
        raise FastacError(f"plan(gpus={gpus}): 1 or more was expected")
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(value.nbytes for value in model.buffers())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = sum(parameter.numel() * OPTIMIZERS[optimizer](parameter.itemsize) for parameter in trained)
    gathered = 0
    if gpus > 1:
        sizes = [
            2 * sum(one.nbytes for one in block.parameters())
            + sum(one.nbytes for one in block.parameters() if one.requires_grad)
            for block in blocks
        ]
        gathered = max(sizes, default=0)
    return States(parameters // gpus + buffers, int(kept / gpus), gathered)


class Planner:
    """Plans policies for one model and one size of inputs."""

    def __init__(self, model: Subject, optimizer: str = "adamw", gpus: int = 1, split: Split = Split()) -> None:  # noqa: B008
        blocks = [block for container in model.containers for block in container.blocks.values()]
        self.states = states_of(model.model, optimizer, gpus, blocks)
        self.gradients = sum(one.nbytes for one in model.model.parameters() if one.requires_grad) // gpus
        self.forecast = Forecast(model, self.states.together, gpus, split)

    def policy(self, name: str) -> PolicyPlan:
        """The plan of a policy that has a name: one of fastac's, "none", or EVERY_SECOND."""
        if name == "none":
            return self.forecast.without_checkpointing()
        if name == EVERY_SECOND:
            return self.forecast.plan(name, self.forecast.every_second_product())
        everywhere = dict.fromkeys(self.forecast.outputs(), NAMED[name])
        return self.forecast.plan(name, self.forecast.of_policies(everywhere))

    def budget(self, limit: int) -> tuple[PolicyPlan, dict[str, Policy]]:
        """The plan of a budget of so many bytes, and what every block saves under it."""
        policy = Policy.budget(limit)
        policies = self.forecast.budgeted(policy)
        return self.forecast.plan(str(policy), self.forecast.of_policies(policies)), policies

    def largest_budget(self, memory: int) -> int | None:
        """The most bytes of saved outputs with which a step fits a memory; None where full checkpointing does not.

        To within a thousandth of all that could be saved, in whole MiB where these fit, as one writes it.
        """
        everything = sum(one.bytes for found in self.forecast.candidates.values() for one in found)
        low, high = 0, everything
        if self.forecast.plan("full", ()).peak_bytes > memory:
            return None
        if self.budget(high)[0].peak_bytes <= memory:
            return -(-high // MIB) * MIB  # more than all is all
        while high - low > everything / 1000:
            middle = (low + high) // 2
            low, high = (middle, high) if self.budget(middle)[0].peak_bytes <= memory else (low, middle)
        step = max(MIB, everything // 1000 // MIB * MIB)
        for limit in range(low // MIB * MIB, 0, -step):
            if self.budget(limit)[0].peak_bytes <= memory:  # fewer bytes may be saved by others, at a worse moment
                return limit
        return low

    def frontier(self, points: int = 257) -> list[tuple[int, float]]:
        """Bytes that are saved and FLOPs relative to full checkpointing, for growing budgets."""
        full = self.forecast.plan("full", ()).flops
        return [(saved, (full - avoided) / full) for saved, avoided in budget.frontier(self.forecast.outputs(), points)]


def plan(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    *,
    blocks: Any = None,
    budget: str | int | None = None,
    memory: str | int | None = None,
    optimizer: str = "adamw",
    gpus: int = 1,
) -> Plan:
    """Plan a step of a model: what each policy holds, its peak, and the FLOPs that it recomputes.

    The model is copied without its data; it may be on the device "meta". inputs: keyword arguments of one call. blocks:
    as in `enable`. budget: bytes of saved outputs, for a plan of `Policy.budget`. memory: of the device, for the
    largest budget with which a step fits. optimizer: a name in OPTIMIZERS. gpus: among how many FSDP2 shards weights.
    Raises FastacError for a model without blocks that are known, inputs that are no mapping, or another optimizer.
    """
    if not isinstance(inputs, Mapping):
        raise FastacError(
            f"plan(inputs=...): a mapping of argument names to values was expected, as in "
            f'{{"hidden_states": ..., "timestep": ...}}, got {type(inputs).__name__}'
        )
    limit = None if budget is None else parse_bytes(budget)
    bytes_of_memory = None if memory is None else parse_bytes(memory)
    planner = Planner(subject(model, inputs, blocks), optimizer, gpus)
    shapes = [f"{name} {tuple(value.shape)}" for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    return put_together(planner, class_name(model), ", ".join(shapes), limit, bytes_of_memory)


def put_together(
    planner: Planner,
    name: str,
    inputs: str,
    limit: int | None = None,
    memory: int | None = None,
) -> Plan:
    """The plan of everything that was asked for, in bytes."""
    try:
        policies = [planner.policy(one) for one in ("none", "full", "long_attn_only", "attn_only", EVERY_SECOND)]
    except FastacError:
        raise
    except BREAKS as error:  # the model's own, or of what is not known of tensors without data
        raise FastacError(f"plan: {name} does not run on {inputs}: {type(error).__name__}: {error}") from error
    chosen: dict[str, Policy] = {}
    if limit is None and memory is not None:
        limit = planner.largest_budget(memory)
    if limit is not None:
        found, chosen = planner.budget(limit)
        policies.append(found)
    return Plan(
        subject=name,
        inputs=inputs,
        states=planner.states,
        gradients=planner.gradients,
        policies=tuple(policies),
        frontier=tuple(planner.frontier()),
        blocks=chosen,
        memory=memory,
        budget=limit,
    )
