"""Shared by the benchmarks: how a model is built, their options, copies in a profile, and how a result is written."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from fastac.cli.machine import machine
from fastac.verification.measuring import Allocated as Allocated
from fastac.verification.measuring import allocated_bytes as allocated_bytes

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


# Profiles

ATTENTION_BACKWARD = (
    r"flash_bwd|FlashAttnBwd|FlashAttentionBackward|fmha_cutlassB|fmha.*bwd|sdpa.*bprop|attn_bwd|\b_bwd_kernel"
)
ATTENTION_FORWARD = (
    r"flash_fwd(_splitkv)?_kernel|FlashAttnFwd(?!Combine)|FlashAttentionForward(?!Combine)|fmha_cutlassF|fmha.*fwd|"
    r"sdpa.*fprop|attn_fwd|\b_fwd_kernel"
)
GROUPS = {
    "attention forward": re.compile(ATTENTION_FORWARD),
    "attention backward": re.compile(ATTENTION_BACKWARD),
    "matrix products": re.compile(r"gemm|nvjet|cutlass.*tensorop", re.IGNORECASE),
}
"""Kernels by their names; the first group counts. flash-attn's backward is several kernels for each call."""

COPIES, OTHER = "copies", "other"
"""Copies: between the GPU and pinned memory, which are those of offload."""

_COPY = re.compile(r"Memcpy (DtoH|HtoD) .*Pinned")


class Kernels(NamedTuple):
    """Of one group, in one step."""

    count: int = 0
    seconds: float = 0.0


def is_copy(kernel: str) -> bool:
    """Whether a kernel of a GPU is a copy between it and pinned memory, by its name."""
    return _COPY.match(kernel) is not None


def group_of(kernel: str) -> str:
    if is_copy(kernel):
        return COPIES
    return next((group for group, names in GROUPS.items() if names.search(kernel)), OTHER)


def on_gpu(events: Iterable[Any]) -> list[Any]:
    """What ran on the GPU among the events of a profile: kernels and copies."""
    kind = torch.autograd.DeviceType.CUDA
    return [event for event in events if event.device_type == kind and not event.is_user_annotation]


def grouped(events: Iterable[Any]) -> dict[str, Kernels]:
    """What ran on the GPU among the events of a profile, by its group."""
    found = dict.fromkeys((*GROUPS, COPIES, OTHER), Kernels())
    for event in on_gpu(events):
        before = found[group := group_of(event.name)]
        found[group] = Kernels(before.count + 1, before.seconds + event.time_range.elapsed_us() / 1e6)
    return found


def _spans(events: Iterable[Any], copies: bool) -> list[tuple[float, float]]:
    """Start and end of what ran on the GPU, in us: of copies of offload, or of kernels."""
    ran = [one for one in on_gpu(events) if is_copy(one.name) or not one.name.startswith(("Memcpy", "Memset"))]
    return sorted((one.time_range.start, one.time_range.end) for one in ran if is_copy(one.name) == copies)


def hidden_seconds(events: Iterable[Any]) -> float:
    """Seconds of copies of offload, among the events of a profile, in which the GPU computed as well."""
    edges = []
    for copies in (True, False):
        for start, end in _spans(events, copies):
            edges += [(start, copies, 1), (end, copies, -1)]
    hidden = last = 0.0
    running = {True: 0, False: 0}
    for now, copies, change in sorted(edges):
        hidden += (now - last) * running[True] * bool(running[False])
        running[copies] += change
        last = now
    return hidden / 1e6


def running_and_waiting(events: Iterable[Any]) -> tuple[float, float]:
    """Seconds of all kernels, and seconds between the first and the last of them in which none ran."""
    spans = _spans(events, copies=False)
    waiting, last = 0.0, spans[0][0] if spans else 0.0
    for start, end in spans:
        waiting += max(0.0, start - last)
        last = max(last, end)
    return sum(end - start for start, end in spans) / 1e6, waiting / 1e6


# Options and results


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
