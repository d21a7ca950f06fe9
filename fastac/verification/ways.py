"""Ways of checkpointing one model, measured beside each other and compared with the first, for `fastac bench`."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastac import hook
from fastac.diagnosis.tables import in_unit, render, table_of_figures, unit_of
from fastac.engine import host_memory
from fastac.engine.beginning import generators_preserved
from fastac.engine.blocks import state_of
from fastac.engine.process import process
from fastac.engine.torch_private import tree_map
from fastac.errors import FastacError, readable_bytes
from fastac.models import published
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning import plan
from fastac.planning.auto import TURNS, Auto, Planner
from fastac.planning.forecast import ROWS
from fastac.planning.video import Tell
from fastac.policy import Policy
from fastac.registry import classify
from fastac.verification.measuring import FAILURES, allocated_bytes, failure, relative, take_turns
from fastac.verification.noise import ComparedSteps
from fastac.verification.ranks import Group
from fastac.verification.report import offloaded_by
from fastac.verification.step import Step, floating, run_step


class Workload:
    """A training step: a model, the keyword arguments of one call, and their device."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        self.model, self.inputs, self.device = model, inputs, torch.device(device)

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    def forward(self) -> torch.Tensor:
        """The loss: the sum of the mean squares of all outputs, from the same random state in every step."""
        torch.manual_seed(0)
        losses = [out.float().square().mean() for out in floating(self.model(**self.inputs)) if out.requires_grad]
        return torch.stack(losses).sum()

    def finish(self, loss: torch.Tensor) -> None:
        """Backward. The gradients are released with the next step."""
        loss.backward()

    def step(self) -> None:
        """The whole step, until the device has finished it."""
        self.finish(self.forward())
        self.synchronize()

    def release(self) -> None:
        """Release the gradients, and wait for the device."""
        self.model.zero_grad(set_to_none=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build(configuration: Configuration, video: Video, device: str | torch.device = "cpu") -> tuple[Any, dict[str, Any]]:
    """A published model with random weights, the same in every call, and the keyword arguments for a video."""
    with generators_preserved():
        torch.manual_seed(0)
        inputs = configuration.inputs(video)
        with torch.device(device):
            model = published.build(configuration, video.dtype)
        # Gradients behind weights that are zero are zero, and comparing them would show nothing.
        published.fill_zeros(model)
    return model, tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)


def is_attention_by_name(op: Any) -> bool:
    """Whether an op has "attention" in its name. Many selective policies use this rule, which misses flash-attn's."""
    name = str(op)
    return "attention" in name and "backward" not in name


def enable_torch_sac(model: Any, is_saved: Callable[[Any], bool] = is_attention_by_name) -> None:
    """torch's selective checkpointing around each block."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not is_saved(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Recompute takes the saved output, so no kernel runs. torch before 2.13 asks the policy again then.
        for counter in process.replayed_calls if classify(op) is not None and not context.is_recompute else ():
            counter[op._schema.name] += 1
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


class Ways:
    """The ways to checkpoint one model, one at a time. The first that runs is the reference of all others."""

    def __init__(self, workload: Workload, budget: int | None = None, offload: bool = False) -> None:
        self.workload = workload
        self.budget = budget
        """Bytes of saved outputs for "planned". None means those of attn_only, which `planned` finds out."""
        self.offload = offload
        self.variants = VARIANTS | (OFFLOADED if offload else {})
        self.expected: Step | None = None
        """The first step of the reference."""
        # Its name, and the largest difference between runs of it.
        self.reference, self.noise = "", 0.0
        self.off()

    @functools.cached_property
    def planned(self) -> dict[str, Policy]:
        """The policies of the blocks for the budget."""
        planned = plan(self.workload.model, self.workload.inputs)
        if self.budget is None:
            self.budget = next(row.saved_bytes for row in planned.policies if row.policy == "attn_only")
        return planned.within(self.budget)

    @functools.cached_property
    def planner(self) -> Planner:
        """The plans of "auto", for steps without an optimizer. They are made once. They use the host if `offload`."""
        available = host_memory.available() if self.workload.device.type == "cpu" else None
        # The last tenth is for what a plan does not count. Weights are there already.
        memory = None if available is None else available * 9 // 10 + self.workload.weights
        return Planner(Auto(memory, None if self.offload else 0))

    def to(self, name: str) -> None:
        """Switch a way on and run a step, in which everything is built or cached that is needed once.

        The next steps are ordinary ones: none of them compares the values of recompute with those of the forward.
        """
        self.off()
        # After a step that ran out of memory, tensors may be in reference cycles, which only this frees.
        gc.collect()
        self.variants[name](self)
        self.current = name
        # "auto" measures the first step, and may choose again after each of the next ones.
        is_new = name == "auto" and self.planner.latest is None
        for _ in range(1 + TURNS if is_new else 1):
            self.workload.step()
            self.workload.release()
        for block in self.blocks():
            # Values are compared in the steps 0, 1, 2, 4, 8, ...: this number is far from the next power of two.
            state_of(block).step = 2**20 + 1

    def compare(self) -> Mapping[str, Any]:
        """Figures of the way that is switched on. `fastac.verify`'s judge compares it with the reference."""
        name = self.current
        # An earlier way may have been refused, or have run out of memory: it is no reference.
        if self.expected is None:
            self.reference, self.expected = name, self._step(name)
        # Every comparison begins with the first step, and runs its way again only if results differ.
        known = [replace(self.expected)]
        compared = ComparedSteps(
            Group(),
            lambda is_counted: known.pop() if known else self._step(self.reference, is_counted),
            functools.partial(self._step, name),
        )
        runs = compared.runs
        self.noise = max(self.noise, *runs.noise.values())
        return {
            "attention": sum(compared.later.executions),
            "compared": len(runs.reference),
            "different": len(runs.different),
            "broken": len(runs.broken()),
            "largest_difference": max(runs.different.values(), default=0.0),
            "runs": runs.count,
            "is_deterministic": compared.is_deterministic,
        }

    def _step(self, name: str, is_counted: bool = True) -> Step:
        """A step of a way, which is switched on for it."""
        if self.current != name:
            self.to(name)
        step = run_step(self.workload.model, self.workload.model, (), self.workload.inputs, is_counted)
        # On a GPU, the tensors would count as bytes of the next step.
        step.tensors = {name: None if tensor is None else tensor.cpu() for name, tensor in step.tensors.items()}
        return step

    def blocks(self) -> list[torch.nn.Module]:
        """The blocks, if the way that is switched on uses `fastac.enable`."""
        enabled = hook.enabled_on(self.workload.model)
        return [] if enabled is None else list(enabled.blocks.values())

    def off(self) -> None:
        """Leave the model without checkpointing and gradients."""
        self.current = ""  # the name of the way that is switched on
        # This comes first: it restores the switch of the model itself, which is switched off next.
        hook.disable(self.workload.model)
        self.workload.model.disable_gradient_checkpointing()
        self.workload.release()


def _enabling(policy: str | Policy) -> Callable[[Ways], object]:
    return lambda ways: hook.enable(ways.workload.model, policy)


# The order counts: the first way that runs is the reference of all others.
VARIANTS: dict[str, Callable[[Ways], object]] = {
    "none": lambda ways: None,
    "full": lambda ways: ways.workload.model.enable_gradient_checkpointing(),
    "attn_only": _enabling("attn_only"),
    "long_attn_only": _enabling("long_attn_only"),
    "planned": lambda ways: hook.enable(ways.workload.model, ways.planned),
    "auto": lambda ways: hook.enable(ways.workload.model, ways.planner),
    "torch SAC, by name": lambda ways: enable_torch_sac(ways.workload.model),
}
"""Ways to checkpoint a model that has no checkpointing now."""

OFFLOADED = {name: _enabling(ROWS[name]) for name in ("full, offload", "attn_only, offload")}
"""More of them, with offload, by the names of the plan."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Figures of one way to checkpoint a model. Bytes do not contain weights and inputs."""

    variant: str
    """The name of the way."""
    problem: str = ""
    """Why there are no figures."""
    seconds: tuple[float, ...] = ()
    """The time of each timed step."""
    relative: float | None = None
    """The median over rounds of its time divided by that of full checkpointing."""
    held_bytes: int = 0
    """Bytes between forward and backward."""
    peak_bytes: int = 0
    """The largest number of bytes at any time of a step."""
    host_bytes: int = 0
    """Bytes in host memory between forward and backward. On a CPU, held_bytes contains them."""
    chosen: str = ""
    """What policy "auto" chose, in a line."""
    copies: int = 0
    """Copies to the host and back in a step."""
    waited_bytes: tuple[int, ...] = ()
    """Bytes of each copy that the device waited for; none on a CPU."""
    attention: int = 0
    """Attention kernels that ran in a step."""
    compared: int = 0
    """The number of outputs and gradients."""
    different: int = 0
    """How many of these are not bitwise equal to the reference's."""
    broken: int = 0
    """How many of these differ by more than the noise of the reference."""
    largest_difference: float = 0.0
    """The largest difference, relative to the norm of the result."""
    runs: int = 1
    """How often the reference ran to judge it."""
    is_deterministic: bool = False
    """Whether outputs and gradients were compared with torch's deterministic kernels."""


# Every step seeds torch's generator, which is the caller's as well.
@generators_preserved()
def bench(
    workload: Workload,
    subject: str,
    rounds: int,
    budget: int | None = None,
    offload: bool = False,
    tell: Tell = lambda text: None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Measurements:
    """Measure every way of checkpointing, and compare outputs and gradients with those of the first that runs.

    A way that is refused, or runs out of memory, becomes a row that says so. budget and offload are those of `Ways`.
    left_out: ways that are not run, and why. The model is left without checkpointing. Raises FastacError if no way
    could be run.
    """
    ways = Ways(workload, budget, offload)
    rows: dict[str, Measurement] = {}
    for name in ways.variants:
        if name in left_out:
            rows[name] = Measurement(name, left_out[name])
            continue
        tell(f"{name}: warm-up, bytes")
        try:
            ways.to(name)
            held, peak = allocated_bytes(workload.forward, workload.finish, workload.device)
            row = Measurement(name, held_bytes=held, peak_bytes=peak, chosen=hook.plan_in_words(workload.model))
            if (moved := offloaded_by(ways.blocks())) is not None:
                waited = moved.waited_bytes if workload.device.type == "cuda" else ()
                row = replace(row, host_bytes=moved.host_bytes, copies=moved.copies, waited_bytes=waited)
            workload.release()
            rows[name] = replace(row, **ways.compare())
        except FAILURES as error:
            rows[name] = Measurement(name, failure(error))
    names = [name for name, row in rows.items() if not row.problem]
    tell(f"{rounds} rounds of steps")
    seconds, problems = take_turns(names, rounds, ways.to, workload.step)
    ratios = relative(seconds, "full")
    for name, times in seconds.items():
        rows[name] = replace(rows[name], seconds=tuple(times), relative=ratios.get(name))
    # A way that ran in its warm-up may fail in a later round. Its row then has no figures.
    rows |= {name: Measurement(name, problem) for name, problem in problems.items()}
    ways.off()
    if not ways.reference:
        raise FastacError(f"bench {subject}: no step could be run here: {next(iter(rows.values())).problem}")
    of_all = subject, workload.device.type, rounds, workload.weights, ways.budget
    return Measurements(*of_all, ways.reference, ways.noise, tuple(rows.values()))


# The figures


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Figures of every way to checkpoint a model."""

    subject: str
    """The model and its inputs, in words."""
    device: str
    """The type of the device."""
    rounds: int
    weights: int
    """Bytes of parameters and buffers."""
    budget: int | None
    """Bytes of saved outputs that "planned" was planned for; None if nothing was planned."""
    reference: str
    """The way with whose outputs and gradients the others are compared."""
    noise: float
    """The largest difference between runs of the reference, relative to the norm."""
    rows: tuple[Measurement, ...]

    def __str__(self) -> str:
        captions = [
            f"medians (from - to) of {self.rounds} steps each, in turns; kernels: those of attention in one step",
            f"bytes besides {readable_bytes(self.weights)} of weights; their gradients are in the peak",
        ]
        captions += [f"runs of {self.reference} differ by up to {self.noise:.2g}"] * bool(self.noise)
        captions += [f"budget: {readable_bytes(self.budget)}"] if self.budget is not None else []
        captions += [f"{row.variant}: {row.chosen}" for row in self.rows if row.chosen]
        captions += [_offloaded(row, self.device) for row in self.rows if row.variant in OFFLOADED and not row.problem]
        captions += [f"{row.variant}: {row.problem}" for row in self.rows if ": " in row.problem]
        unit = unit_of(row.peak_bytes for row in self.rows)
        # The slowest way decides for all rows, so that their times have one unit.
        is_short = max((statistics.median(row.seconds) for row in self.rows if row.seconds), default=0) < 1
        times, results = f"{'milliseconds' if is_short else 'seconds'}\n(from - to)", f"results as\n{self.reference}"
        headings = ("policy", "step /\nfull", times, f"held\n{unit}", f"peak\n{unit}", "kernels", results)
        table = table_of_figures(self.subject, captions, headings, texts=(times, results))
        for row in self.rows:
            if row.problem:
                # The cell shows the kind of problem. What went wrong in detail stands below the table.
                table.add_row(row.variant, *[""] * (len(headings) - 2), row.problem.partition(": ")[0])
                continue
            seconds = (1000**is_short * time(row.seconds) for time in (statistics.median, min, max))
            table.add_row(
                row.variant,
                "" if row.relative is None else f"{row.relative:.3f}",
                "{:.4g} ({:.3g}-{:.3g})".format(*seconds),
                *(in_unit(size, unit) for size in (row.held_bytes, row.peak_bytes)),
                str(row.attention),
                self._equality(row),
            )
        return render(table)

    @staticmethod
    def _equality(row: Measurement) -> str:
        if row.broken:
            return f"{row.broken} of {row.compared} differ, by up to {row.largest_difference:.2g} of their norm"
        if row.different:
            return f"within the noise of {row.runs} runs"
        return "bitwise, deterministic kernels" if row.is_deterministic else "bitwise"


def _offloaded(row: Measurement, device: str) -> str:
    """Bytes on the host and, on a GPU, the copies that it waited for."""
    waited = f"{len(row.waited_bytes)} of {row.copies} copies waited for ({readable_bytes(sum(row.waited_bytes))})"
    return f"{row.variant}: {readable_bytes(row.host_bytes)} on the host" + f", {waited}" * (device == "cuda")
