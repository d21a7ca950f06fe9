"""What `fastac bench` and the benchmarks measure: bytes as the allocator sees them, time in turns, and on what machine.

In this order: the machine; bytes; copies; turns; every way of checkpointing on one model; what that took, as a table.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastac import hook
from fastac.engine.blocks import record_of
from fastac.engine.tape import engine
from fastac.engine.torch_private import profiled_events, tree_map
from fastac.errors import FastacError, readable_bytes
from fastac.models import published
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning import Plan, plan
from fastac.planning.plans import ROWS
from fastac.registry import classify
from fastac.verify import Step, differences, floating, offloaded_by, render, run_step

Tell = Callable[[str], object]

# The machine


def machine() -> dict[str, Any]:
    """What JSON has of the machine. A distribution that is not installed has no version; without CUDA there is no gpu.

    load_average: well above `threads`, others were at work as well.
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
    """A CUDA device, by default the current one: its name and memory, and the versions of CUDA and cuDNN."""
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


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# Bytes


_MARK = "fastac: what a run holds is read here"


class Allocated(NamedTuple):
    """Bytes above what there was before: still allocated at the end of a run, and at the worst moment."""

    held: int
    peak: int


def allocated_bytes(
    run: Callable[[], Any], then: Callable[[Any], object] | None = None, device: str | torch.device = "cpu"
) -> Allocated:
    """What a run allocates on a device, as the allocator saw it. Its result is alive when what it holds is read.

    then: is given the result afterwards, and may let go of it; the peak is of both.
    """
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
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
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return Allocated(held, peak)


# Copies

_COPY = re.compile(r"Memcpy (DtoH|HtoD) .*Pinned")


def is_copy(kernel: str) -> bool:
    """Whether what ran on a GPU is a copy between it and pinned memory, by its name."""
    return _COPY.match(kernel) is not None


def hidden_seconds(events: Iterable[Any]) -> float:
    """Of the time of copies among the events of a profile, that in which the GPU computed as well."""
    edges = []
    for event in events:
        is_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        if is_on_gpu and not event.is_user_annotation:
            copies = is_copy(event.name)
            if copies or not event.name.startswith(("Memcpy", "Memset")):
                edges += [(event.time_range.start, copies, 1), (event.time_range.end, copies, -1)]
    hidden = last = 0.0
    running = {True: 0, False: 0}
    for now, copies, change in sorted(edges):
        hidden += (now - last) * running[True] * bool(running[False])
        running[copies] += change
        last = now
    return hidden / 1e6


# Turns

FAILURES = (FastacError, RuntimeError)
"""What one way to run a step may raise while others go on: refused by fastac, out of memory, or refused by torch."""


def failure(error: Exception) -> str:
    """What became of a way to run a step that raised one of FAILURES, in a line."""
    # On a CPU torch has no error of its own for want of memory.
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
    tell: Callable[[str], object] = lambda text: None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time several ways to run a step: in each round every way once, in an order drawn anew.

    A slower spell of the machine meets all of them. switch: is given the name of the way to run next, and is not timed.
    The step ends when its work is done: it synchronizes. Garbage is collected between steps, never within one. Returns
    the seconds of each way in each round, and what became of those that failed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    problems: dict[str, str] = {}
    order = random.Random(0)
    gc.collect()
    gc.freeze()  # what is alive by now need not be walked through again in every round
    gc.disable()
    try:
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            for name in order.sample(list(seconds), len(seconds)):
                gc.collect()
                try:
                    switch(name)
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
    """The median over rounds of each way's time over that of another in the same round; nothing where that failed."""
    if to not in seconds:
        return {}
    return {
        name: statistics.median(a / b for a, b in zip(series, seconds[to], strict=True))
        for name, series in seconds.items()
    }


# Ways of checkpointing


class Workload:
    """A training step: a model, the keyword arguments of one call, and where they are."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        self.model, self.inputs, self.device = model, inputs, torch.device(device)

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(one.nbytes for one in (*self.model.parameters(), *self.model.buffers()))

    def forward(self) -> torch.Tensor:
        """The loss: mean squares of all outputs, from the same random state in every step."""
        torch.manual_seed(0)
        losses = [out.float().square().mean() for out in floating(self.model(**self.inputs)) if out.requires_grad]
        return torch.stack(losses).sum()

    def finish(self, loss: torch.Tensor) -> None:
        """Backward. The gradients are released with the next step."""
        loss.backward()

    def step(self) -> None:
        """The whole step, until the device has done it."""
        self.finish(self.forward())
        self.synchronize()

    def release(self) -> None:
        """Release the gradients, and wait for what the device still does: the next step begins anew."""
        self.model.zero_grad(set_to_none=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build(configuration: Configuration, video: Video, device: str | torch.device = "cpu") -> tuple[Any, dict[str, Any]]:
    """A published model with random weights, the same in every call, and the keyword arguments for a video."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = configuration.inputs(video)
        with torch.device(device):
            model = published.build(configuration, video.dtype)
        published.fill_zeros(model)
    return model, tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)


def is_attention_by_name(op: Any) -> bool:
    """By a part of the op's name, as selective policies in training code commonly decide; it misses flash-attn's."""
    name = str(op)
    return "attention" in name and "backward" not in name


def enable_torch_sac(model: Any, is_saved: Callable[[Any], bool] = is_attention_by_name) -> None:
    """torch's selective checkpointing around each block."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not is_saved(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Its recompute gets what is saved now. torch before 2.13 asks again then.
        for counter in engine.answered if classify(op) is not None and not context.is_recompute else ():
            counter[op._schema.name] += 1
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


NONE, FULL, ATTENTION, PLANNED = "none", "full", "attn_only", "planned"


class Switch:
    """The ways to checkpoint one model, one at a time.

    budget: bytes of saved outputs for PLANNED; by default those of attn_only, by the plan. offload: whether those of
    OFFLOADED are among them.
    """

    def __init__(self, workload: Workload, budget: int | None = None, offload: bool = False) -> None:
        self.workload, self._budget = workload, budget
        self.variants = {**VARIANTS, **(OFFLOADED if offload else {})}
        self.off()

    @functools.cached_property
    def plan(self) -> Plan:
        """Of the model and its inputs."""
        return plan(self.workload.model, self.workload.inputs)

    @property
    def budget(self) -> int:
        """Bytes of saved outputs for PLANNED."""
        if self._budget is None:
            self._budget = next(one.saved_bytes for one in self.plan.policies if one.policy == ATTENTION)
        return self._budget

    def to(self, name: str) -> None:
        """Switch a way on and let it run a step: what is built once is built, and memory is cached for its sizes.

        The steps that follow are like most: in none of them is recompute compared with the forward by value.
        """
        self.off()
        gc.collect()  # what a step that ran out of memory left
        self.variants[name](self)
        self.workload.step()
        self.workload.release()
        for block in self.blocks():
            record_of(block).step = 2**20 + 1

    def blocks(self) -> list[torch.nn.Module]:
        """The blocks, where the way that is switched on is one of fastac's."""
        enabled = hook.enabled_on(self.workload.model)
        return [] if enabled is None else list(enabled.blocks.values())

    def moved(self) -> dict[str, Any]:
        """What the latest step moved to the host and back, as Measurement has it. Waits for the device."""
        found = offloaded_by(self.blocks())
        if found is None:
            return {}
        waited = found.waited_bytes if self.workload.device.type == "cuda" else ()
        return {"host_bytes": found.host_bytes, "copies": found.copies, "waited_bytes": waited}

    def off(self) -> None:
        """Leave the model without checkpointing and gradients."""
        hook.disable(self.workload.model)
        self.workload.model.disable_gradient_checkpointing()
        self.workload.release()


VARIANTS: Mapping[str, Callable[[Switch], object]] = {
    NONE: lambda switch: None,
    FULL: lambda switch: switch.workload.model.enable_gradient_checkpointing(),
    ATTENTION: lambda switch: hook.enable(switch.workload.model, ATTENTION),
    "long_attn_only": lambda switch: hook.enable(switch.workload.model, "long_attn_only"),
    PLANNED: lambda switch: hook.enable(switch.workload.model, switch.plan.within(switch.budget)),
    "torch SAC, by name": lambda switch: enable_torch_sac(switch.workload.model),
}
"""Ways to checkpoint a model that has no checkpointing now."""

OFFLOADED: Mapping[str, Callable[[Switch], object]] = {
    "full, offload": lambda switch: hook.enable(switch.workload.model, ROWS["full, offload"]),
    "attn_only, offload": lambda switch: hook.enable(switch.workload.model, ROWS["attn_only, offload"]),
}
"""More of them, with what they keep in host memory, by the names of the plan."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one way to checkpoint a model took. problem: why there are no figures, else empty.

    seconds: of each timed step. relative: the median over rounds of its time over that of full checkpointing. Bytes
    are above those of weights and inputs: held between forward and backward, and the most at one time of a step.
    host_bytes: held on the host between forward and backward, which on a CPU are among those held. copies: to the host
    and back in a step; waited_bytes: of each of them that the device was idle for, none on a CPU.
    attention: kernels that ran in a step. different: of the outputs and gradients compared, how many are not bitwise
    those of the reference, and by how much at most.
    """

    variant: str
    problem: str = ""
    seconds: tuple[float, ...] = ()
    relative: float | None = None
    held_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    copies: int = 0
    waited_bytes: tuple[int, ...] = ()
    attention: int = 0
    compared: int = 0
    different: int = 0
    largest_difference: float = 0.0


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
    for name in switch.variants:
        tell(f"{name}: warm-up, bytes")
        try:
            switch.to(name)
            held, peak = allocated_bytes(workload.forward, workload.finish, workload.device)
            moved = switch.moved()
            workload.release()
            rows[name] = Measurement(name, held_bytes=held, peak_bytes=peak, **moved, **look(name))
        except FAILURES as error:
            rows[name] = Measurement(name, failure(error))
    names = [name for name, row in rows.items() if not row.problem]
    seconds, problems = take_turns(names, rounds, switch.to, workload.step, clock=clock, tell=tell)
    ratios = relative(seconds, FULL)
    for name, series in seconds.items():
        rows[name] = dataclasses.replace(rows[name], seconds=tuple(series), relative=ratios.get(name))
    for name, problem in problems.items():
        rows[name] = Measurement(name, problem)
    switch.off()
    return list(rows.values())


def bench(
    workload: Workload,
    subject: str,
    *,
    rounds: int = 5,
    budget: int | None = None,
    offload: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    tell: Tell = lambda text: None,
) -> Measurements:
    """Measure every way of checkpointing, and compare outputs and gradients with those of the first that runs.

    budget, offload: as of Switch. The model is left without checkpointing. Raises FastacError where none could be run.
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

    switch = Switch(workload, budget, offload)
    rows = measure(switch, compare, rounds=rounds, clock=clock, tell=tell)
    if not expected:
        raise FastacError(f"bench {subject}: no step could be run here: {rows[0].problem}")
    ((reference, _, noise),) = expected
    if any(row.variant == PLANNED and not row.problem for row in rows):
        budget = switch.budget
    device = workload.device.type
    return Measurements(subject, device, rounds, workload.weights, budget, reference, noise, tuple(rows))


def _on_host(step: Step) -> Step:
    """With copies in the memory of the host: on a GPU they would count as the next step's."""
    tensors = {name: None if one is None else one.cpu() for name, one in step.tensors.items()}
    return dataclasses.replace(step, tensors=tensors)


# What they took


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What every way to checkpoint a model took.

    device: its type. weights: bytes of parameters and buffers. budget: bytes, None where not known.
    reference: whose outputs and gradients the others were compared with. noise: by how much its own differ from run to
    run, above 0 where kernels are not deterministic.
    """

    subject: str
    device: str
    rounds: int
    weights: int
    budget: int | None
    reference: str
    noise: float
    rows: tuple[Measurement, ...]

    def __str__(self) -> str:
        captions = [
            f"medians of {self.rounds} steps each, in turns",
            f"bytes besides {readable_bytes(self.weights)} of weights; their gradients are in the peak",
        ]
        captions += [f"two runs of {self.reference} differ by up to {self.noise:.2g}"] * bool(self.noise)
        captions += [f"budget: {readable_bytes(self.budget)}"] if self.budget is not None else []
        more = offload_columns(self.rows, self.device)
        if more and self.device == "cpu":
            captions += ["on a CPU the host and the device are one memory: what is on the host is held as well"]
        equality = f"outputs and gradients as {self.reference}"
        return render(table_of(self.rows, self.subject, captions, {equality: self._equality, **more}))

    def as_json(self) -> dict[str, Any]:
        """The measurements in what JSON has."""
        return dataclasses.asdict(self)

    def _equality(self, row: Measurement) -> str:
        if not row.different:
            return "bitwise"
        return f"{row.different} of {row.compared} differ, by up to {row.largest_difference:.2g}"


def offload_columns(rows: Sequence[Measurement], device: str) -> dict[str, Callable[[Measurement], str]]:
    """Columns of what is on the host, and of copies where these are beside what is computed; none without OFFLOADED."""
    if not any(row.variant in OFFLOADED for row in rows):
        return {}
    columns: dict[str, Callable[[Measurement], str]] = {"on the host": lambda row: readable_bytes(row.host_bytes)}
    if device == "cuda":
        columns["copies waited for"] = lambda row: (
            f"{len(row.waited_bytes)} of {row.copies} ({readable_bytes(sum(row.waited_bytes))})"
        )
    return columns


def table_of(
    rows: Sequence[Measurement], title: str, captions: Sequence[str], more: Mapping[str, Callable[[Measurement], str]]
) -> Table:
    """What every way took, and what became of those that have no figures. more: the last columns, by heading."""
    problems = [f"{row.variant}: {row.problem}" for row in rows if ": " in row.problem]
    table = Table(title=title, title_justify="left", caption="\n".join([*captions, *problems]), caption_justify="left")
    headings = ("step / full", "seconds (from - to)", "held", "peak", "attention kernels")
    table.add_column("checkpointing", no_wrap=True)
    for heading in (*headings, *more):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.problem:
            table.add_row(row.variant, *[""] * len(headings), row.problem.partition(": ")[0])
            continue
        table.add_row(
            row.variant,
            "" if row.relative is None else f"{row.relative:.3f}",
            f"{statistics.median(row.seconds):.4g} ({min(row.seconds):.4g} - {max(row.seconds):.4g})",
            *map(readable_bytes, (row.held_bytes, row.peak_bytes)),
            str(row.attention),
            *(figure(row) for figure in more.values()),
        )
    return table
