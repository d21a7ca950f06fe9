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

from fastac import models
from fastac.cli.measuring import Workload, bench, build, machine
from fastac.cli.plan import add_video, telling, video_of
from fastac.errors import FastacError
from fastac.models import published as configurations
from fastac.planning.plans import parse_bytes


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
    if options.json is not None and not options.json.parent.is_dir():
        raise FastacError(f"bench --json {options.json}: there is no folder {options.json.parent}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise FastacError("bench --device cuda: torch finds no GPU here")
    # Read at the first matmul: without it torch's deterministic algorithms refuse every matmul on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with telling() as status, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models' own
        status.update(f"building {options.model}")
        subject, workload = workload_of(options)
        found = bench(workload, subject, options.rounds, budget, options.offload, status.update)
    print(found)
    if options.json is not None:
        what = {"command": shlex.join(["fastac", *options.arguments]), "machine": machine()} | dataclasses.asdict(found)
        options.json.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    return 0


def workload_of(options: argparse.Namespace) -> tuple[str, Workload]:
    """The step of the options, in words and to run. Raises FastacError for a model or sizes that are not possible."""
    found = configurations.load(options.model)
    video = video_of(options, found.default)
    if options.layers is not None:
        found = dataclasses.replace(found, config=configurations.with_layers(found.config, options.layers))
    model, inputs = build(found, video, options.device)
    if options.backend is not None:
        try:
            model.set_attention_backend(options.backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise FastacError(f"bench --backend {options.backend}: diffusers cannot use it here: {error}") from error
    lists = {one.name: len(one.blocks) for one in models.containers(model, models.row_of(model))}
    blocks = ", ".join(f"{name} x {count}" for name, count in lists.items())
    described = f"{found.name}: {video}, {blocks}, {options.dtype} on {options.device}"
    return described, Workload(model, inputs, options.device)
