"""fastac plan: bytes and FLOPs of each policy on a video, before training."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastac.diagnosis.tables import console
from fastac.errors import FastacError, parse_bytes, readable_bytes
from fastac.models import published as configurations
from fastac.models.videos import Video
from fastac.planning import Plan, places
from fastac.planning.fake_model import DEVICES
from fastac.planning.forecast import OPTIMIZERS, ROWS, PolicyFigures
from fastac.planning.plans import AUTO, GBPS, TFLOPS, WITHIN
from fastac.planning.video import Tell, Training, plan_video

GIB = 2**30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fastac plan`."""
    add_video(parser)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train only LoRA weights of attention")
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS), help="default: %(default)s")
    parser.add_argument("--gpus", type=int, default=1, help="over which FSDP2 shards the model (default: %(default)s)")
    parser.add_argument("--context-parallel", type=int, default=1, help="of these, that split a video (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=DEVICES, help="that trains (default: %(default)s)")
    parser.add_argument("--budget", metavar="BYTES", help='of saved outputs, for one more row: "40GiB"')
    parser.add_argument("--offload", action="store_true", help="offload the row of the budget to host memory")
    parser.add_argument("--memory", metavar="BYTES", help="of a device: the best that fits, and the longest videos")
    parser.add_argument(
        "--host",
        metavar="BYTES",
        default="64GiB",
        help="of host memory for each GPU, for the best (default: %(default)s)",
    )
    parser.add_argument("--gbps", type=float, default=GBPS, help="of the bus, in each direction (default: %(default)s)")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="of the device, for GB/s (default: %(default)s)")
    parser.add_argument("--checkpointed", type=int, metavar="BLOCKS", help="rows with the first so many checkpointed")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw FLOPs over memory: .png, .svg or .pdf")


def add_video(parser: argparse.ArgumentParser) -> None:
    """Add arguments for a published model, and for a video, which `video_of` reads."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(configurations.shipped())}, a diffusers class, or the path of a transformer's config.json",
    )
    for name in ("frames", "height", "width"):
        parser.add_argument(f"--{name}", type=int, help="of the video; default: what the model was made for")
    parser.add_argument("--batch", type=int, default=1, help="videos per step and device (default: %(default)s)")
    parser.add_argument("--text-tokens", type=int, help="tokens of each text; default: what the model was made for")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES), help="of weights and video (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Print a plan. Raises FastacError if that is not possible."""
    budget, memory = (None if text is None else parse_bytes(text) for text in (options.budget, options.memory))
    host = parse_bytes(options.host)
    if options.offload and budget is None:
        raise FastacError("plan --offload is for the row of --budget. For --memory, --host says what may leave")
    # This comes first: a simulation may take minutes, and a plot that cannot be written would waste them.
    if options.plot is not None:
        check_plot(options.plot)
    configuration = configurations.load_configuration(options.model)
    with telling() as tell, warnings.catch_warnings():
        # The models warn about a missing device.
        warnings.simplefilter("ignore")
        # torch logs a traceback for an error that fastac reports itself, in one line.
        logging.getLogger("torch._subclasses.fake_tensor").disabled = True
        plan = plan_video(
            configuration,
            video_of(options, configuration.default),
            Training(options.lora, options.optimizer, options.gpus, options.context_parallel, options.device),
            budget=budget,
            offload=options.offload,
            memory=memory,
            host=host,
            gbps=options.gbps,
            tflops=options.tflops,
            checkpointed=options.checkpointed,
            tell=tell,
        )
    if options.json:
        print(json.dumps({"configuration": configuration.source, **plan.as_json()}, indent=2))
    else:
        print(plan)
        for line in lines_of(plan, options):
            print(line)
    if options.plot is not None:
        with telling() as tell:
            tell("drawing FLOPs over memory")
            plot(plan, options.plot)
    return 0


def video_of(options: argparse.Namespace, default: Video) -> Video:
    """The video of the options. A size that they leave out is the model's default."""
    sizes = {name: getattr(options, name) for name in ("frames", "height", "width", "text_tokens")}
    changes: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    return dataclasses.replace(default, batch=options.batch, dtype=DTYPES[options.dtype], **changes)


def lines_of(plan: Plan, options: argparse.Namespace) -> list[str]:
    """The code for the best policy that fits --memory. Without that option, for --budget and for --checkpointed."""
    if options.memory is not None:
        return [] if plan.best is None else code_of(plan.best, options)
    asked = [row for row in plan.policies if row.policy.startswith((WITHIN, "attn_only, first"))]
    lines = [code_of(row, options) for row in reversed(asked)]
    return [line for number, code in enumerate(lines) for line in ["or"] * bool(number) + code]


def code_of(row: PolicyFigures, options: argparse.Namespace) -> list[str]:
    """The lines of Python that enable the policy of a row."""
    if row.policy == "none":
        return ["# It fits without checkpointing: nothing is to be enabled."]
    if row.policy in ROWS:
        return [f"fastac.enable(transformer, {ROWS[row.policy].as_code()})"]
    if not row.policy.startswith((WITHIN, AUTO)):
        policy = json.dumps(row.policy.partition(",")[0])
        return [f"fastac.enable(transformer, fastac.first_blocks(transformer, {options.checkpointed}, {policy}))"]
    if options.context_parallel > 1:
        # `fastac.plan` does not know about context parallelism, so no code makes this plan: --json has the policies.
        return []
    planned, within = ["transformer", "inputs"], []
    if row.policy == AUTO:
        # The peak depends on the states.
        planned += [f'optimizer="{options.optimizer}"'] * (options.optimizer != "adamw")
        planned += [f"gpus={options.gpus}"] * (options.gpus > 1)
        within.append(f"memory={json.dumps(options.memory)}")
        if row.host_bytes:
            within.append(f"host={json.dumps(options.host)}")
            # `fastac.plan` is for a device of TFLOPS.
            gbps = options.gbps * TFLOPS / options.tflops
            within += [f"gbps={gbps:g}"] * (gbps != GBPS)
    else:
        within += [json.dumps(options.budget)] + ["offload=True"] * options.offload
    return [
        f"plan = fastac.plan({', '.join(planned)})",
        f"fastac.enable(transformer, plan.within({', '.join(within)}))",
    ]


@contextlib.contextmanager
def telling() -> Iterator[Tell]:
    """Say on stderr what is being done: on a terminal in a line that changes, otherwise in a line for each stage."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    # rich redraws this line in a thread of its own, which takes time from the steps that are measured: draw seldom.
    with console(stderr=True).status("", refresh_per_second=2) as status:
        yield status.update


def check_plot(path: Path) -> None:
    """Raise FastacError if no plot can be written: matplotlib or the folder is missing, or the suffix is unknown."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise FastacError("plan: a plot needs matplotlib: pip install matplotlib") from error
    suffixes = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in suffixes:
        raise FastacError(
            f"plan --plot {path}: its name must end in one of {', '.join(f'.{suffix}' for suffix in suffixes)}"
        )
    if not path.parent.is_dir():
        raise FastacError(f"plan --plot {path}: there is no folder {path.parent}")


def plot(plan: Plan, path: str | Path) -> None:
    """Draw FLOPs over the memory of the device, with the rows of a plan. path: a path that `check_plot` accepts.

    Raises FastacError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    # pyplot may look for a window system, and keeps every figure alive.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    limit = f"{readable_bytes(plan.host)} of host memory"
    for host, color, label in (
        (0, "tab:gray", "best without host memory"),
        (plan.host, "tab:blue", f"best with {limit} at {plan.gbps:g} GB/s"),
    ):
        peaks, relative = zip(*((row.peak_bytes / GIB, row.relative) for row in best_rows(plan, host)), strict=True)
        axes.plot(peaks, relative, ".-", color=color, linewidth=1.5, label=label, zorder=1)
    for row in plan.policies:
        if row.policy == "none":
            label = f"no checkpointing ({readable_bytes(row.peak_bytes)})"
            axes.axhline(row.relative, color="gray", linestyle="--", linewidth=1, label=label)
            continue
        marker, size = ("*", 130) if row.policy.startswith((WITHIN, AUTO)) else ("o", 45)
        axes.scatter(row.peak_bytes / GIB, row.relative, marker=marker, s=size, zorder=2, label=row.policy)
    axes.set(xlabel="peak of the device, GiB", ylabel="FLOPs of a step, relative to full checkpointing")
    axes.set_title(f"{plan.subject}\n{plan.inputs}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise FastacError(f"plan: cannot write the plot {path}: {error}") from error


def best_rows(plan: Plan, host: int) -> list[PolicyFigures]:
    """The best policies for a dozen memories of the device, from the least that fits to all that outputs could take.

    host: bytes of the host.
    """
    forecast = plan.forecast
    peaks = {row.peak_bytes for row in plan.policies if row.policy != "none"}
    least, most = min(peaks), forecast.peak(places.EVERYTHING)
    between = {int(least * (most / least) ** (number / 8)) for number in range(1, 8)}
    rows = []
    for memory in sorted(peaks | between | {most}):
        room = plan.room(memory, host)
        policies = places.choose(forecast, room, waits=False)
        if policies is not None:
            rows.append(forecast.figures(policies))
    return rows
