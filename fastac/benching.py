"""Every way of checkpointing on one model: time, bytes, attention kernels and gradients of a training step.

The model is built once, and its checkpointing is switched: first each way runs until nothing of it is decided or
watched any more, and its bytes, kernels and gradients are looked at; then all of them take turns under the clock.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastac import hook, interception, measuring, shares
from fastac.comparison import Step, differences, floating, run_step
from fastac.errors import FastacError
from fastac.measurements import Measurement, Measurements
from fastac.measuring import allocated_bytes
from fastac.policy import Policy, policies_in
from fastac.reporting import report

WARM_UP = 2
"""Steps that each way runs first, untimed: one that is watched, and under a budget one that shares it out."""

Tell = Callable[[str], object]


class Workload:
    """A training step: a model, the keyword arguments of one call, and where they are."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        self.model, self.inputs, self.device = model, inputs, torch.device(device)

    def forward(self) -> torch.Tensor:
        """The loss: mean squares of all outputs, from the same random state in every step."""
        torch.manual_seed(0)
        losses = [out.float().square().mean() for out in floating(self.model(**self.inputs)) if out.requires_grad]
        return torch.stack(losses).sum()

    def finish(self, loss: torch.Tensor) -> None:
        """Backward. The gradients are let go of with the next step."""
        loss.backward()

    def step(self) -> None:
        """The whole step, until the device has done it."""
        self.finish(self.forward())
        self.synchronize()

    def release(self) -> None:
        """Let go of the gradients, and wait for what the device still does: the next step begins anew."""
        self.model.zero_grad(set_to_none=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def by_name(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A selective policy as people write it: by a part of the op's name."""
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def enable_by_name(model: Any) -> None:
    """torch's selective checkpointing around each block, with that policy."""
    contexts = functools.partial(create_selective_checkpoint_contexts, by_name)
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def enable_budget(model: Any, limit: int | None) -> None:
    """fastac under a budget. Raises FastacError where it is not known of how many bytes."""
    if limit is None:
        raise FastacError("of how many bytes is not known, for attn_only did not run. Name them: --budget")
    hook.enable(model, Policy.budget(limit))


NONE, FULL, ATTENTION, BUDGET = "none", "full", "attn_only", "budget"

VARIANTS: Mapping[str, Callable[[Any, int | None], None]] = {
    NONE: lambda model, limit: None,
    FULL: lambda model, limit: model.enable_gradient_checkpointing(),
    ATTENTION: lambda model, limit: hook.enable(model, ATTENTION),
    "long_attn_only": lambda model, limit: hook.enable(model, "long_attn_only"),
    BUDGET: enable_budget,
    "torch SAC, by name": lambda model, limit: enable_by_name(model),
}
"""Ways to checkpoint a model that has no checkpointing now. They are given the bytes of a budget, if known."""


class Switch:
    """The ways to checkpoint one model. Each is switched on anew as it was left, with all that it has learned."""

    def __init__(self, workload: Workload, budget: int | None = None) -> None:
        interception.install()  # so that kernels are counted without checkpointing as well
        hook.disable(workload.model)
        workload.model.disable_gradient_checkpointing()
        self.workload, self.limit = workload, budget
        self._plain = hook.snapshot(workload.model)
        self._ways: dict[str, hook.Snapshot] = {}

    def first(self, name: str) -> None:
        """Switch a way on for the first time and let it run until it does the same in every step."""
        model = self.workload.model
        hook.restore(model, self._plain)
        gc.collect()  # what a step that ran out of memory left
        VARIANTS[name](model, self.limit)
        for _ in range(WARM_UP):
            self.workload.release()
            self.workload.step()
        if _waits(model):
            raise FastacError(f"the budget was not shared out in {WARM_UP} steps")
        if name == ATTENTION and self.limit is None:
            self.limit = sum(row.saved_bytes for row in report(model).rows)
        self._ways[name] = hook.snapshot(model)

    def to(self, name: str) -> None:
        """Switch a way on again. On a GPU it runs a step: the allocator's cache has blocks of another's sizes."""
        hook.restore(self.workload.model, self._ways[name])
        self.workload.release()
        if self.workload.device.type == "cuda":
            self.workload.step()
            self.workload.release()

    def off(self) -> None:
        """Leave the model without checkpointing and gradients."""
        hook.restore(self.workload.model, self._plain)
        self.workload.release()


def _waits(model: torch.nn.Module) -> bool:
    """Whether a budget is still to be shared out."""
    setting = hook.setting_of(model)
    policies = () if setting is None else policies_in(setting.policy)
    return any(policy.is_budget and shares.decided(policy) is None for policy in policies)


def measure(
    switch: Switch,
    look: Callable[[str], Mapping[str, Any]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    tell: Tell = lambda text: None,
) -> list[Measurement]:
    """Measure every way of checkpointing. What is refused, or runs out of memory, becomes a row that says so.

    look: is called once with the name of each way, while it is switched on, and returns more fields of its row.
    The model is left without checkpointing.
    """
    workload = switch.workload
    rows: dict[str, Measurement] = {}
    for name in VARIANTS:
        tell(f"{name}: warm-up, bytes")
        try:
            switch.first(name)
            workload.release()
            held, peak = allocated_bytes(workload.forward, workload.finish, workload.device)
            workload.release()
            rows[name] = Measurement(name, held_bytes=held, peak_bytes=peak, **look(name))
        except measuring.FAILURES as error:
            rows[name] = Measurement(name, measuring.told(error))
    names = [name for name, row in rows.items() if not row.problem]
    turns = measuring.take_turns(names, rounds, switch.to, workload.step, clock=clock, tell=tell)
    ratios = measuring.relative(turns.seconds, FULL)
    for name, series in turns.seconds.items():
        rows[name] = dataclasses.replace(rows[name], seconds=tuple(series), relative=ratios.get(name))
    for name, problem in turns.problems.items():
        rows[name] = Measurement(name, problem)
    switch.off()
    return list(rows.values())


def bench(
    workload: Workload,
    subject: str,
    *,
    rounds: int = 5,
    budget: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    tell: Tell = lambda text: None,
) -> Measurements:
    """Measure every way of checkpointing, and compare outputs and gradients with those of the first that runs.

    budget: bytes of saved outputs for `Policy.budget`; by default those that attn_only saves. The model is left without
    checkpointing. Raises FastacError where no way could be run.
    """
    expected: list[tuple[str, Step, float]] = []

    def one_step() -> Step:
        return _on_host(run_step(workload.model, workload.model, (), workload.inputs))

    def compare(name: str) -> Mapping[str, Any]:
        got = one_step()
        if not expected:
            expected.append((name, got, max(differences(got, one_step()).values(), default=0.0)))
        off = differences(expected[0][1], got)
        return {
            "attention": sum(got.executions),
            "compared": len(got.tensors),
            "different": len(off),
            "largest_difference": max(off.values(), default=0.0),
        }

    switch = Switch(workload, budget)
    rows = measure(switch, compare, rounds=rounds, clock=clock, tell=tell)
    if not expected:
        raise FastacError(f"bench {subject}: no step could be run here: {rows[0].problem}")
    ((reference, _, noise),) = expected
    weights = sum(one.nbytes for one in (*workload.model.parameters(), *workload.model.buffers()))
    return Measurements(subject, rounds, weights, switch.limit, reference, noise, tuple(rows))


def _on_host(step: Step) -> Step:
    """With copies in the memory of the host: on a GPU they would count as the next step's."""
    tensors = {name: None if one is None else one.cpu() for name, one in step.tensors.items()}
    return dataclasses.replace(step, tensors=tensors)
