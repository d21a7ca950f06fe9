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

from fastac import machine, models
from fastac.benching import Workload, bench
from fastac.checks import require_device, set_backend
from fastac.errors import FastacError
from fastac.models import ModelRow
from fastac.models import published as configurations
from fastac.plan_command import DTYPES, telling, video_of
from fastac.sizes import parse_bytes
from fastac.torch_internals import tree_map

SIZES = ("frames", "height", "width", "batch", "text_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `fastac bench` takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(configurations.shipped())}, the path of a transformer's config.json, or a diffusers class, "
        "for its tiny model as in `fastac check`; random weights",
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
    parser.add_argument("--budget", metavar="BYTES", help="of saved outputs; default: those that attn_only saves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and the machine's, as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table. Raises FastacError for what can not be measured."""
    for name in (*SIZES, "layers", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise FastacError(f"bench --{name.replace('_', '-')} {value}: 1 or more was expected")
    budget = None if options.budget is None else parse_bytes(options.budget)
    if options.json is not None and not options.json.parent.is_dir():
        raise FastacError(f"bench --json {options.json}: there is no folder {options.json.parent}")
    require_device("bench", options.device)
    if torch.device(options.device).type not in ("cpu", "cuda"):
        raise FastacError(f"bench --device {options.device}: bytes can be measured on cpu and cuda")
    with telling() as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models' own
        tell(f"building {options.model}")
        subject, workload = workload_of(options)
        found = bench(workload, subject, rounds=options.rounds, budget=budget, tell=tell)
    print(found)
    if options.json is not None:
        what = {"command": _command(options), "machine": machine.facts(), **found.as_json()}
        options.json.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    return 0


def workload_of(options: argparse.Namespace) -> tuple[str, Workload]:
    """What the options ask for, in words and as a step. Raises FastacError for what there is not, or does not fit."""
    row = models.MODELS.get(options.model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        described, model, inputs = _published(options) if row is None else _tiny(options, row)
    if options.backend is not None:
        set_backend("bench", model, options.backend)
    lists = {found.name: len(found.blocks) for found in models.containers(model, models.row_of(model))}
    if options.layers is not None and max(lists.values()) != options.layers:
        counts = ", ".join(f"{name} x {count}" for name, count in lists.items())
        raise FastacError(f"bench --layers {options.layers}: {options.model} has {counts}")
    blocks = ", ".join(f"{name} x {count}" for name, count in lists.items())
    return f"{described}, {blocks}, {options.dtype} on {options.device}", Workload(model, inputs, options.device)


def _tiny(options: argparse.Namespace, row: ModelRow) -> tuple[str, Any, dict[str, Any]]:
    given = [name for name in SIZES if getattr(options, name) is not None]
    if given:
        raise FastacError(
            f"bench --{given[0].replace('_', '-')}: {row.name} stands for its tiny model, whose inputs have one size. "
            f"For sizes, name one of {', '.join(configurations.shipped())} or a config.json."
        )
    if not models.is_available(row):
        raise FastacError(f"bench {row.name}: the diffusers that is installed has no such class")
    if options.layers is not None:
        row = dataclasses.replace(row, config=configurations.with_layers(row.config, options.layers))
    model, inputs = models.tiny_model(row, DTYPES[options.dtype], options.device)
    return f"{row.name} (tiny)", model, inputs


def _published(options: argparse.Namespace) -> tuple[str, Any, dict[str, Any]]:
    found = configurations.load(options.model)
    video = video_of(argparse.Namespace(**{**vars(options), "batch": options.batch or 1}), found.default)
    inputs = found.inputs(video)
    if options.layers is not None:
        found = dataclasses.replace(found, config=configurations.with_layers(found.config, options.layers))
    with torch.device(options.device):
        model = configurations.build(found, DTYPES[options.dtype])
    configurations.fill_zeros(model)
    sizes = f"{video.batch} x {video.frames} frames of {video.height} x {video.width}, {video.text_tokens} text tokens"
    device = options.device
    inputs = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
    return f"{found.name}: {sizes}", model, inputs


def _command(options: argparse.Namespace) -> str:
    """The command that measures the same again, without where its JSON went."""
    words = ["fastac", "bench", options.model]
    for name in (*SIZES, "layers", "dtype", "device", "backend", "rounds", "budget"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
