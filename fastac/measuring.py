"""What a step takes: bytes as the allocator sees them, and the time of several ways to run it that take turns."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.errors import FastacError

FAILURES = (FastacError, RuntimeError)
"""What one way to run a step may raise while others go on: refused by fastac, out of memory, or refused by torch."""

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
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = now = peak = 0
    for event in events:
        if event.name() == _MARK:
            held = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return Allocated(held, peak)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch raised it for want of memory, on a GPU or a CPU, which has no error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def told(error: Exception) -> str:
    """What became of a way to run a step that raised one of FAILURES, in a line."""
    if is_out_of_memory(error):
        return "out of memory"
    line = str(error).strip().partition("\n")[0]
    return f"refused: {line}" if isinstance(error, FastacError) else f"failed: {line}"


class Turns(NamedTuple):
    """Seconds of each way in each round, and what became of those that failed."""

    seconds: dict[str, list[float]]
    problems: dict[str, str]


def take_turns(
    names: Sequence[str],
    rounds: int,
    switch: Callable[[str], object],
    step: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], object] = lambda text: None,
) -> Turns:
    """Time several ways to run a step: in each round every way once, in an order drawn anew.

    A slower spell of the machine meets all of them. switch: is given the name of the way to run next, and is not timed.
    The step ends when its work is done: it synchronizes. Garbage is collected between steps, never within one.
    """
    turns = Turns({name: [] for name in names}, {})
    order = random.Random(0)
    with _without_collecting():
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            for name in order.sample(list(turns.seconds), len(turns.seconds)):
                gc.collect()
                try:
                    switch(name)
                    gc.collect()
                    start = clock()
                    step()
                    turns.seconds[name].append(clock() - start)
                except FAILURES as error:
                    turns.problems[name] = told(error)
                    del turns.seconds[name]
    return turns


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is alive by now need not be walked through again in every round
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def relative(seconds: Mapping[str, Sequence[float]], to: str) -> dict[str, float]:
    """The median over rounds of each way's time over that of another in the same round; nothing where that failed."""
    if to not in seconds:
        return {}
    return {
        name: statistics.median(a / b for a, b in zip(series, seconds[to], strict=True))
        for name, series in seconds.items()
    }
