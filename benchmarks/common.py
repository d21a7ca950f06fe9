"""Shared by the benchmarks: how a model is built, their options, copies in a profile, and how a result is written."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

from fastac.cli.measuring import Allocated as Allocated
from fastac.cli.measuring import allocated_bytes as allocated_bytes
from fastac.cli.measuring import machine

RESULTS = Path(__file__).resolve().parent / "results"


def build_model(cls: Any, dtype: torch.dtype, **config: Any) -> Any:
    """A model with the same random weights in every call, to be trained, all of it in `dtype`."""
    diffusers.utils.logging.set_verbosity_error()  # it would rather keep norms in fp32: no matter without training
    torch.manual_seed(0)
    return cls(**config).to(dtype).train()


def parser(description: str | None, output: str, check: str = "") -> argparse.ArgumentParser:
    """Options with --output, by default a file of that name among the results, and --check where there is a check."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--output", type=Path, default=RESULTS / output, help="where the JSON goes")
    if check:
        found.add_argument("--check", action="store_true", help=f"fail when {check}")
    return found


_COPY = re.compile(r"Memcpy (DtoH|HtoD) .*Pinned")


def is_copy(kernel: str) -> bool:
    """Whether a kernel of a GPU is a copy between it and pinned memory, by its name."""
    return _COPY.match(kernel) is not None


def hidden_seconds(events: Iterable[Any]) -> float:
    """Seconds of such copies, among the events of a profile, in which the GPU computed as well."""
    edges = []
    for event in events:
        is_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
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


def positive(text: str) -> int:
    """The type of an option that is a number of something."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as JSON, with the machine it was measured on and the command that measures it again."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": machine(), **result}, indent=2) + "\n")


def finish(options: argparse.Namespace, result: dict[str, Any], wrong: Sequence[str]) -> int:
    """Write a result, and say what is not as it should be: with --check that is 1, the exit status."""
    write_result(options.output, result)
    for line in wrong:
        print(line)
    return int(options.check and bool(wrong))
