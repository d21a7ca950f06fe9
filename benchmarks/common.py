"""What the benchmarks share: how a model is built, the facts of the machine, and how a result is written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

RESULTS = Path(__file__).resolve().parent / "results"


def build_model(cls: Any, dtype: torch.dtype, **config: Any) -> Any:
    """A model with the same random weights in every call, to be trained, all of it in `dtype`."""
    diffusers.utils.logging.set_verbosity_error()  # it would rather keep norms in fp32: no matter without training
    torch.manual_seed(0)
    return cls(**config).to(dtype).train()


class Allocated(NamedTuple):
    """Bytes: still allocated at the end of a run, and at its worst moment, above what there was before."""

    held: int
    peak: int


def allocated_bytes(run: Callable[[], Any]) -> Allocated:
    """What a run allocates, as the allocator saw it. Its result is alive at the end."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return Allocated(held, peak)


def processor() -> str:
    """The processor's name, which `platform` does not know on Linux."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as JSON, with the machine it was measured on and the command that measures it again."""
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # well above `threads`: others were at work as well
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "fastac")},
    }
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": machine, **result}, indent=2) + "\n")
