"""Bytes as the allocator sees them, and time in turns."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine.torch_private import profiled_events, profiler
from fastac.errors import FastacError

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
