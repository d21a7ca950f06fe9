"""fastac bench: what every way of checkpointing takes on this machine, measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
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
    """What `fastac bench` takes."""
    add_video(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N blocks of each list; default: all")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument("--backend", help="a diffusers attention backend, as `fastac backends` lists them")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each policy (default: %(default)s)")
    parser.add_argument(
        "--budget", metavar="BYTES", help="of saved outputs for what is planned; default: those that attn_only saves"
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="measure full and attn_only with what they keep in host memory as well; on a CPU host and device are one "
        "memory, and bytes that are held do not fall",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and the machine's, as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table. Raises FastacError for what cannot be measured."""
    for name in ("layers", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise FastacError(f"bench --{name} {value}: 1 or more was expected")
    budget = None if options.budget is None else parse_bytes(options.budget)
    if options.json is not None and not options.json.parent.is_dir():
        raise FastacError(f"bench --json {options.json}: there is no folder {options.json.parent}")
    _check_device(options.device)
    with telling() as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models' own
        tell(f"building {options.model}")
        subject, workload = workload_of(options)
        found = bench(workload, subject, rounds=options.rounds, budget=budget, offload=options.offload, tell=tell)
    print(found)
    if options.json is not None:
        what = {"command": shlex.join(["fastac", *options.arguments]), "machine": machine(), **found.as_json()}
        options.json.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    return 0


def workload_of(options: argparse.Namespace) -> tuple[str, Workload]:
    """What the options ask for, in words and as a step. Raises FastacError for what there is not, or does not fit."""
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
    if options.layers is not None and max(lists.values()) != options.layers:
        raise FastacError(f"bench --layers {options.layers}: {options.model} has {blocks}")
    sizes = f"{video.batch} x {video.frames} frames of {video.height} x {video.width}, {video.text_tokens} text tokens"
    described = f"{found.name}: {sizes}, {blocks}, {options.dtype} on {options.device}"
    return described, Workload(model, inputs, options.device)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
        known = torch.device(device).type in ("cpu", "cuda")
    except (RuntimeError, AssertionError) as error:  # torch without this device says so in either way
        raise FastacError(f"bench --device {device}: torch cannot use it here: {error}") from error
    if not known:
        raise FastacError(f"bench --device {device}: bytes can be measured on cpu and cuda")
