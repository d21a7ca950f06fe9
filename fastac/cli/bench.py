"""fastac bench: time and bytes of every way of checkpointing, measured on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import warnings
from pathlib import Path

import torch

from fastac.cli.machine import machine
from fastac.cli.plan import add_video, telling, video_of
from fastac.engine import host_memory
from fastac.errors import FastacError, parse_bytes, readable_bytes
from fastac.models import block_lists
from fastac.models import published as configurations
from fastac.models.published import BLOCK_COUNTS, Configuration, with_layers
from fastac.models.videos import Video
from fastac.planning.video import Tell, Training, plan_video
from fastac.verification.ways import Workload, bench, build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fastac bench`."""
    add_video(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N blocks of each list; default: all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--backend", help="a diffusers attention backend, as `fastac backends` lists them")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each policy (default: %(default)s)")
    parser.add_argument(
        "--budget", metavar="BYTES", help='of saved outputs for the row "planned"; default: those of attn_only'
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="measure full and attn_only with offload, too; on a CPU host and device are one memory, and held bytes do "
        "not fall",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and the machine's, as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table. Raises FastacError if that is not possible."""
    for name in ("layers", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise FastacError(f"bench --{name} {value}: 1 or more was expected")
    budget = None if options.budget is None else parse_bytes(options.budget)
    # Everything that can be checked now is checked before the measurements, which take minutes.
    if options.json is not None and not options.json.parent.is_dir():
        raise FastacError(f"bench --json {options.json}: there is no folder {options.json.parent}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise FastacError("bench --device cuda: torch finds no GPU here")
    # cuBLAS reads it at the first matmul. Without it, torch's deterministic algorithms refuse every matmul on a GPU;
    # pytorch/pytorch#161749 is about removing that check.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with telling() as tell, warnings.catch_warnings():
        # Warnings of the models would stand between the lines of progress.
        warnings.simplefilter("ignore")
        configuration = configurations.load_configuration(options.model)
        video = video_of(options, configuration.default)
        if options.layers is not None:
            configuration = _shortened(configuration, options.layers)
        too_large = does_not_fit(configuration, video, options, budget, tell)
        tell(f"building {options.model}")
        subject, workload = workload_of(configuration, video, options)
        measured = bench(workload, subject, options.rounds, budget, options.offload, tell, too_large)
    print(measured)
    if options.json is not None:
        command = shlex.join(["fastac", *options.arguments])
        figures = {"command": command, "machine": machine(), **dataclasses.asdict(measured)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _shortened(configuration: Configuration, layers: int) -> Configuration:
    """A model with at most so many blocks in each list."""
    return dataclasses.replace(configuration, config=with_layers(configuration.config, layers))


def does_not_fit(
    configuration: Configuration, video: Video, options: argparse.Namespace, budget: int | None, tell: Tell
) -> dict[str, str]:
    """Way of checkpointing -> why it cannot run here: by a plan, its step needs more memory than is available.

    Small models are not planned. Raises FastacError if no way can run, and says which sizes would fit.
    """
    is_cpu, training = options.device == "cpu", Training(optimizer="sgd", device=options.device)
    available = host_memory.available() if is_cpu else torch.cuda.mem_get_info()[0]
    # A plan takes time. It is not needed if even a rough upper bound fits.
    if available is None or _rough_bytes(configuration, video) < available:
        return {}
    # The last tenth is for what a plan does not count.
    usable = available * 9 // 10
    try:
        plan = plan_video(configuration, video, training, budget=budget, tell=tell)
    except FastacError as error:
        # Some models cannot be simulated. They are measured without a plan.
        tell(f"not planned, and may run out of memory: {error}")
        return {}
    tell(f"planned: {plan.policies[1].flops / 1e12:,.4g} TFLOPs in a step under full checkpointing")
    peaks = {row.policy: row.peak_bytes for row in plan.policies if options.offload or not row.host_bytes}
    # Without --budget, `planned` saves as many bytes as attn_only.
    peaks |= {"planned": peaks["attn_only"] if budget is None else plan.policies[-1].peak_bytes}
    # No plan has a row for torch SAC. It saves attention as well, so the same bytes are assumed.
    peaks["torch SAC, by name"] = peaks["attn_only"]
    if is_cpu:
        # There, offload does not free memory, and the gradients of the reference stay beside those of the step.
        peaks = {name: peaks[name.removesuffix(", offload")] + plan.gradients for name in peaks}
    here = f"of {readable_bytes(available)} available, {readable_bytes(usable)} may be used"
    if (least := min(peaks.values())) > usable:
        raise FastacError(
            f"bench {configuration.name}: {video} needs {readable_bytes(least)}, and {here}, on {options.device}. "
            f"{_what_fits(configuration, video, training, usable, tell)}"
        )
    return {
        name: f"does not fit: {readable_bytes(size)} are planned, and {here}"
        for name, size in peaks.items()
        if size > usable
    }


def _rough_bytes(configuration: Configuration, video: Video) -> int:
    """An upper bound of what a step without checkpointing holds, quickly: 4 times as much, for Wan 2.1 1.3B."""
    # A model on meta has sizes and no memory: the real model may be what does not fit.
    with torch.device("meta"):
        model = configurations.build(configuration, video.dtype)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    widths = sum(module.in_features + module.out_features for module in linear)
    tokens = video.batch * (video.tokens(configuration.patch) + video.text_tokens)
    return video.dtype.itemsize * (6 * tokens * widths + 3 * sum(weight.numel() for weight in model.parameters()))


def _what_fits(configuration: Configuration, video: Video, training: Training, available: int, tell: Tell) -> str:
    """Options under which full checkpointing fits: fewer blocks, or if a single block is too much, fewer frames."""
    # `--layers` shortens every list that is longer, so halving begins at the longest list.
    layers = max(value for name in BLOCK_COUNTS if isinstance(value := configuration.config.get(name), int))
    step = video.compression.frames * configuration.patch[0]
    while layers > 1 or video.frames > step:
        if layers > 1:
            layers //= 2
        else:
            # Models take frames in groups, and some a single frame before them. Whole groups are halved, the rest
            # stays.
            groups, rest = divmod(video.frames - 1, step)
            video = dataclasses.replace(video, frames=groups // 2 * step + rest + 1)
        sizes = f"--layers {layers} --frames {video.frames}"
        tell(f"planning {sizes}")
        row = plan_video(_shortened(configuration, layers), video, training)
        if row.policies[1].peak_bytes + row.gradients <= available:
            return f"{sizes} would fit."
    return "No fewer blocks and frames would fit: try a smaller --height and --width."


def workload_of(configuration: Configuration, video: Video, options: argparse.Namespace) -> tuple[str, Workload]:
    """The step of the options, in words and to run. Raises FastacError for sizes that are not possible."""
    model, inputs = build(configuration, video, options.device)
    if options.backend is not None:
        try:
            model.set_attention_backend(options.backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise FastacError(f"bench --backend {options.backend}: diffusers cannot use it here: {error}") from error
    blocks = ", ".join(f"{name} x {len(members)}" for name, members in block_lists(model).items())
    described = f"{configuration.name}: {video}, {blocks}, {options.dtype} on {options.device}"
    return described, Workload(model, inputs, options.device)
