"""fastac bench: what every way of checkpointing takes on this machine, measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import torch

from fastac import models
from fastac.cli.measuring import Workload, bench, machine
from fastac.cli.plan import DTYPES, telling, video_of
from fastac.engine.torch_private import tree_map
from fastac.errors import FastacError
from fastac.models import published as configurations
from fastac.planning.plans import parse_bytes

SIZES = ("frames", "height", "width", "batch", "text_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `fastac bench` takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(configurations.shipped())}, a diffusers class, or the path of a transformer's config.json; "
        "random weights",
    )
    for name in ("frames", "height", "width"):
        parser.add_argument(f"--{name}", type=int, help="of the video; default: what the model was made for")
    parser.add_argument("--batch", type=int, help="videos per step; default: 1")
    parser.add_argument("--text-tokens", type=int, help="tokens of each text; default: what the model was made for")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N blocks of each list; default: all")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES), help="of weights and video (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument("--backend", help="a diffusers attention backend, as `fastac backends` lists them")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each policy (default: %(default)s)")
    parser.add_argument(
        "--budget", metavar="BYTES", help="of saved outputs for what is planned; default: those that attn_only saves"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and the machine's, as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table. Raises FastacError for what cannot be measured."""
    for name in (*SIZES, "layers", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise FastacError(f"bench --{name.replace('_', '-')} {value}: 1 or more was expected")
    budget = None if options.budget is None else parse_bytes(options.budget)
    if options.json is not None and not options.json.parent.is_dir():
        raise FastacError(f"bench --json {options.json}: there is no folder {options.json.parent}")
    _check_device(options.device)
    with telling() as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models' own
        tell(f"building {options.model}")
        subject, workload = workload_of(options)
        found = bench(workload, subject, rounds=options.rounds, budget=budget, tell=tell)
    print(found)
    if options.json is not None:
        what = {"command": _command(options), "machine": machine(), **found.as_json()}
        options.json.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    return 0


def workload_of(options: argparse.Namespace) -> tuple[str, Workload]:
    """What the options ask for, in words and as a step. Raises FastacError for what there is not, or does not fit."""
    found = configurations.load(options.model)
    video = video_of(argparse.Namespace(**{**vars(options), "batch": options.batch or 1}), found.default)
    inputs = found.inputs(video)
    if options.layers is not None:
        found = dataclasses.replace(found, config=configurations.with_layers(found.config, options.layers))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device(options.device):
            model: Any = configurations.build(found, DTYPES[options.dtype])
        configurations.fill_zeros(model)
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
    inputs = tree_map(lambda value: value.to(options.device) if isinstance(value, torch.Tensor) else value, inputs)
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


def _command(options: argparse.Namespace) -> str:
    """The command that measures the same again, without where its JSON went."""
    words = ["fastac", "bench", options.model]
    for name in (*SIZES, "layers", "dtype", "device", "backend", "rounds", "budget"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
