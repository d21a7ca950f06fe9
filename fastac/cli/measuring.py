"""Measurements of `fastac bench` and of the benchmarks: bytes as the allocator sees them, time in turns, the machine.

In this order: the machine; bytes; turns; the ways of checkpointing a model; their figures, as a table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastac import hook
from fastac.cli import version
from fastac.engine import host_memory
from fastac.engine.beginning import generators_preserved
from fastac.engine.blocks import state_of
from fastac.engine.process import process
from fastac.engine.torch_private import profiled_events, profiler, tree_map
from fastac.errors import FastacError, readable_bytes
from fastac.models import published
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning import plan
from fastac.planning.auto import Auto, Planner
from fastac.planning.forecast import ROWS
from fastac.planning.plans import in_unit, table_of_figures, unit_of
from fastac.policy import Policy
from fastac.registry import classify
from fastac.verification.noise import MOST_EQUAL, Tensors, deterministic_kernels, deterministic_runs, two_runs
from fastac.verification.report import offloaded_by
from fastac.verification.step import Step, floating, run_step
from fastac.verification.tables import render

if TYPE_CHECKING:
    from rich.table import Table

Tell = Callable[[str], object]

# The machine


def machine() -> dict[str, Any]:
    """The machine, for JSON. The version of a distribution that is not installed is None; without CUDA there is no gpu.

    A `load_average` well above `threads` means that other processes were running.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "diffusers", "fastac")},
        **({"gpu": gpu()} if torch.cuda.is_available() else {}),
    }


def gpu(device: torch.device | int | None = None) -> dict[str, Any]:
    """Name and memory of a CUDA device, by default the current one, and the versions of CUDA and cuDNN."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _processor() -> str:
    """The processor's name, which `platform` does not know on Linux."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


# Bytes


# In the profile, a range of this name marks the moment between forward and backward.
_MARK = "fastac: held bytes are read here"


class Allocated(NamedTuple):
    """Bytes that a run allocated."""

    held: int
    """Bytes that are still allocated at its end."""
    peak: int
    """The largest number of bytes at any time."""


def allocated_bytes(
    run: Callable[[], Any], then: Callable[[Any], object] | None = None, device: str | torch.device = "cpu"
) -> Allocated:
    """Bytes that a run allocates on a device, by the allocator. Its result is alive when held bytes are read.

    then: is called with the result afterwards, and may release it; the peak covers both.
    """
    # Garbage of earlier steps that is freed during the run would count as negative bytes.
    gc.collect()
    if torch.device(device).type == "cpu":
        return _allocated_on_cpu(run, then)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    held = torch.cuda.memory_allocated(device) - before
    if then is not None:
        then(result)
    return Allocated(held, torch.cuda.max_memory_allocated(device) - before)


def _allocated_on_cpu(run: Callable[[], Any], then: Callable[[Any], object] | None) -> Allocated:
    # torch keeps no statistics of CPU memory. The profiler lists every allocation and release.
    with profiler(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
        with torch.profiler.record_function(_MARK):
            pass
        if then is not None:
            then(result)
    held = now = peak = 0
    for event in profiled_events(profile):
        if event.name() == _MARK:
            held = now
        elif event.name() == "[memory]":
            # The number of a release is negative.
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return Allocated(held, peak)


# Turns

FAILURES = (FastacError, RuntimeError)
"""Errors of one way to run a step that do not end the others: refused by fastac or torch, out of memory."""


def failure(error: Exception) -> str:
    """An error of FAILURES in a line."""
    # On a CPU, torch raises a plain RuntimeError if memory cannot be allocated.
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return "out of memory"
    line = str(error).strip().partition("\n")[0]
    return f"refused: {line}" if isinstance(error, FastacError) else f"failed: {line}"


def take_turns(
    names: Sequence[str],
    rounds: int,
    switch: Callable[[str], object],
    step: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time several ways to run a step. A round runs every way once, in random order, so that a slow time hits all.

    Garbage is collected between steps, never within a step.

    Args:
        names: the names of the ways.
        rounds: how many steps of each way are timed.
        switch: called with the name of the next way; not timed.
        step: runs a step, until the device has finished it.
        clock: returns seconds.

    Returns:
        Seconds of each way in each round, and one line for each way that failed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    problems: dict[str, str] = {}
    # The order does not depend on the steps, which draw from generators themselves.
    order = random.Random(0)
    gc.collect()
    # Later collections skip the objects that are alive now, and are quick.
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order.sample(list(seconds), len(seconds)):
                gc.collect()
                try:
                    switch(name)
                    # Collection is off while the clock runs, so what the switch dropped is collected before.
                    gc.collect()
                    start = clock()
                    step()
                    seconds[name].append(clock() - start)
                except FAILURES as error:
                    problems[name] = failure(error)
                    del seconds[name]
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds, problems


def relative(seconds: Mapping[str, Sequence[float]], to: str) -> dict[str, float]:
    """For each way, the median over rounds of its time divided by the time of `to` in that round; {} if that failed."""
    if to not in seconds:
        return {}
    return {
        # The ratio is taken within a round: if the machine was slow in that round, it was slow for both.
        name: statistics.median(a / b for a, b in zip(series, seconds[to], strict=True))
        for name, series in seconds.items()
    }


# Ways of checkpointing


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
    """The ways to checkpoint one model, one at a time."""

    def __init__(self, workload: Workload, budget: int | None = None, offload: bool = False) -> None:
        self.workload = workload
        self.budget = budget
        """Bytes of saved outputs for "planned". None means those of attn_only, which `planned` finds out."""
        self.offload = offload
        self.variants = VARIANTS | (OFFLOADED if offload else {})
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
        return Planner(Auto(memory, None if self.offload else 0, "sgd"))

    def to(self, name: str) -> None:
        """Ways a way on and run a step, in which everything is built or cached that is needed once.

        The next steps are ordinary ones: none of them compares the values of recompute with those of the forward.
        """
        self.off()
        # After a step that ran out of memory, tensors may be in reference cycles, which only this frees.
        gc.collect()
        self.variants[name](self)
        # "auto" measures two steps, and plans again before the third if that changes much.
        is_new = name == "auto" and self.planner.latest is None
        for _ in range(3 if is_new else 1):
            self.workload.step()
            self.workload.release()
        for block in self.blocks():
            # Values are compared in the steps 0, 1, 2, 4, 8, ...: this number is far from the next power of two.
            state_of(block).step = 2**20 + 1

    @property
    def chosen(self) -> str:
        """What "auto" chose, if it is switched on, in a line."""
        enabled = hook.enabled_on(self.workload.model)
        return "" if enabled is None else enabled.plan_in_words

    def blocks(self) -> list[torch.nn.Module]:
        """The blocks, if the way that is switched on uses `fastac.enable`."""
        enabled = hook.enabled_on(self.workload.model)
        return [] if enabled is None else list(enabled.blocks.values())

    def off(self) -> None:
        """Leave the model without checkpointing and gradients."""
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


# Every step seeds torch's generator, which is the caller's as well.
@generators_preserved()
def measure(
    ways: Ways,
    look: Callable[[str], Mapping[str, Any]],
    rounds: int,
    tell: Tell,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> list[Measurement]:
    """Measure every way of checkpointing. A way that is refused, or runs out of memory, becomes a row that says so.

    look: called once with the name of each way, while it is switched on; returns more fields of its row.
    left_out: ways that are not run, and why. The model is left without checkpointing.
    """
    workload = ways.workload
    rows: dict[str, Measurement] = {}
    for name in ways.variants:
        if name in left_out:
            rows[name] = Measurement(name, left_out[name])
            continue
        tell(f"{name}: warm-up, bytes")
        try:
            ways.to(name)
            held, peak = allocated_bytes(workload.forward, workload.finish, workload.device)
            row = Measurement(name, held_bytes=held, peak_bytes=peak, chosen=ways.chosen)
            if (moved := offloaded_by(ways.blocks())) is not None:
                waited = moved.waited_bytes if workload.device.type == "cuda" else ()
                row = replace(row, host_bytes=moved.host_bytes, copies=moved.copies, waited_bytes=waited)
            workload.release()
            rows[name] = replace(row, **look(name))
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
    return list(rows.values())


def bench(
    workload: Workload,
    subject: str,
    rounds: int = 5,
    budget: int | None = None,
    offload: bool = False,
    tell: Tell = lambda text: None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Measurements:
    """Measure every way of checkpointing, and compare outputs and gradients with those of the first that runs.

    budget and offload are those of `Ways`, left_out is that of measure. The model is left without checkpointing.
    Raises FastacError if no way could be run.
    """
    # The first way may be refused, or run out of memory, so the reference is not known before one runs.
    references: list[_Reference] = []

    def compare(name: str) -> Mapping[str, Any]:
        if not references:
            references.append(_Reference(name, ways))
        return references[0].compare(name)

    ways = Ways(workload, budget, offload)
    rows = measure(ways, compare, rounds, tell, left_out)
    if not references:
        raise FastacError(f"bench {subject}: no step could be run here: {rows[0].problem}")
    (reference,) = references
    return Measurements(
        subject,
        workload.device.type,
        rounds,
        workload.weights,
        ways.budget,
        reference.name,
        max(reference.runs.noise.values(), default=0.0),
        tuple(rows),
        reference.runs.count,
        reference.is_deterministic,
    )


class _Reference:
    """Runs of the first way, which is switched on. All others are compared with it, as in `fastac.verify`."""

    def __init__(self, name: str, ways: Ways) -> None:
        self.name, self.ways, self.workload = name, ways, ways.workload
        self.is_deterministic, self.runs_again = False, True
        self.runs = two_runs(self._tensors)
        if self.runs.is_noisy:
            runs, _ = deterministic_runs(self._tensors)
            if runs is not None:
                self.runs, self.is_deterministic = runs, True
        while self.runs.is_noisy and self.runs.count < MOST_EQUAL:
            self.runs.add_reference(self._tensors())

    def _tensors(self) -> Tensors:
        return self._step(is_counted=False).tensors

    def _step(self, is_counted: bool) -> Step:
        step = run_step(self.workload.model, self.workload.model, (), self.workload.inputs, is_counted)
        # On a GPU, the tensors would count as bytes of the next step.
        step.tensors = {name: None if tensor is None else tensor.cpu() for name, tensor in step.tensors.items()}
        return step

    def compare(self, name: str) -> Mapping[str, Any]:
        """Figures of the way that is switched on."""
        with deterministic_kernels() if self.is_deterministic else contextlib.nullcontext():
            step = self._step(is_counted=True)
            distances = self.runs.add(name, step.tensors)
            # Noise that is rare may not have hit the reference, or this way: run both again.
            for _ in range(MOST_EQUAL):
                if not self.runs.broken(name):
                    break
                if self.runs_again and self.runs.may_change():
                    self._add_reference(name)
                distances = self.runs.add(name, self._tensors())
        return {
            "attention": sum(step.executions),
            "compared": len(step.tensors),
            "different": sum(map(bool, distances.values())),
            "broken": len(self.runs.broken(name)),
            "largest_difference": max(distances.values(), default=0.0),
        }

    def _add_reference(self, name: str) -> None:
        """Run the reference once more. name: of the way that is switched on, before and after."""
        try:
            self.ways.to(self.name)
            self.runs.add_reference(self._tensors())
        except FAILURES:
            self.runs_again = False  # it ran, but may lack memory now: the runs that there are decide
        self.ways.to(name)


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
    runs: int = 1
    """How often the reference ran."""
    is_deterministic: bool = False
    """Whether outputs and gradients were compared with torch's deterministic kernels."""

    def __str__(self) -> str:
        captions = [
            f"medians (from - to) of {self.rounds} steps each, in turns; kernels: those of attention in one step",
            f"bytes besides {readable_bytes(self.weights)} of weights; their gradients are in the peak",
        ]
        captions += [f"{self.runs} runs of {self.reference} differ by up to {self.noise:.2g}"] * bool(self.noise)
        captions += [f"budget: {readable_bytes(self.budget)}"] if self.budget is not None else []
        captions += [f"{row.variant}: {row.chosen}" for row in self.rows if row.chosen]
        captions += [_offloaded(row, self.device) for row in self.rows if row.variant in OFFLOADED and not row.problem]
        return render(table_of(self.rows, self.subject, captions, {f"results as\n{self.reference}": self._equality}))

    def _equality(self, row: Measurement) -> str:
        if row.broken:
            return f"{row.broken} of {row.compared} differ, by up to {row.largest_difference:.2g} of their norm"
        if row.different:
            return f"within the noise of {self.runs} runs"
        return "bitwise, deterministic kernels" if self.is_deterministic else "bitwise"


def _offloaded(row: Measurement, device: str) -> str:
    """Bytes on the host and, on a GPU, the copies that it waited for."""
    waited = f"{len(row.waited_bytes)} of {row.copies} copies waited for ({readable_bytes(sum(row.waited_bytes))})"
    return f"{row.variant}: {readable_bytes(row.host_bytes)} on the host" + f", {waited}" * (device == "cuda")


def table_of(
    rows: Sequence[Measurement], title: str, captions: Sequence[str], more: Mapping[str, Callable[[Measurement], str]]
) -> Table:
    """A table with a row for each way: its figures, or its problem. more: heading -> text, for the last columns."""
    problems = [f"{row.variant}: {row.problem}" for row in rows if ": " in row.problem]
    unit = unit_of(row.peak_bytes for row in rows)
    # The slowest way decides for all rows, so that their times have one unit.
    is_short = max((statistics.median(row.seconds) for row in rows if row.seconds), default=0) < 1
    times = f"{'milliseconds' if is_short else 'seconds'}\n(from - to)"
    figures = ("step /\nfull", times, f"held\n{unit}", f"peak\n{unit}", "kernels")
    table = table_of_figures(title, [*captions, *problems], ("policy", *figures, *more), texts=(times, *more))
    for row in rows:
        if row.problem:
            # The cell shows the kind of problem. What went wrong in detail stands below the table.
            table.add_row(row.variant, *[""] * len(figures), row.problem.partition(": ")[0])
            continue
        table.add_row(
            row.variant,
            "" if row.relative is None else f"{row.relative:.3f}",
            "{:.4g} ({:.3g}-{:.3g})".format(
                *(1000**is_short * time(row.seconds) for time in (statistics.median, min, max))
            ),
            *(in_unit(size, unit) for size in (row.held_bytes, row.peak_bytes)),
            str(row.attention),
            *(figure(row) for figure in more.values()),
        )
    return table
