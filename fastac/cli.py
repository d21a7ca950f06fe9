"""fastac backends | check | plan | bench: what can be saved here, proof on a tiny model, what policies take."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fastac import (
    bench_command,
    checks,
    interception,
    models,
    opaque,
    plan_command,
    plugins,
    preflight,
    registry,
    verification,
)
from fastac.backends import LIBRARIES
from fastac.backends.diffusers import BACKENDS, DiffusersBackend
from fastac.errors import FastacError
from fastac.machine import version
from fastac.plan_command import DTYPES
from fastac.policy import NAMED, resolve
from fastac.rows import AttentionOp, OpaqueFunction, Verdict
from fastac.sizes import readable_bytes

WIDTH, WIDE = 100, 160  # of what is printed where there is no terminal; of a table with many columns
SHORT = 60  # letters of a remark that stands in a table
CAN_BE_SAVED = "can be saved"
NUMBERS = ("ops", "attention runs", "again", "saved", "bytes saved")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all is as promised, 1 when it is not, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="fastac", description="Selective activation checkpointing for attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    backends = commands.add_parser("backends", help="every attention library and backend: what fastac does for it here")
    backends.add_argument("--json", action="store_true", help="the same as one JSON object")
    check = commands.add_parser("check", help="prove the promise on a tiny model with random weights, on this machine")
    which = check.add_mutually_exclusive_group(required=True)
    which.add_argument("model", metavar="CLASS", nargs="?", help=f"a diffusers class: {', '.join(models.MODELS)}")
    which.add_argument("--all", action="store_true", help="every class, one after the other, as one table")
    check.add_argument("--json", action="store_true", help="the table of --all as one JSON object")
    check.add_argument("--policy", default="attn_only", choices=list(NAMED), help="default: %(default)s")
    check.add_argument("--backend", help="a diffusers attention backend, as `fastac backends` lists them")
    check.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="default: %(default)s")
    check.add_argument("--device", default="cpu", help="default: %(default)s")
    plan = commands.add_parser("plan", help="bytes and FLOPs of every policy on a video, without weights or GPU")
    plan_command.add_arguments(plan)
    bench = commands.add_parser("bench", help="time and bytes of every policy, measured on this machine")
    bench_command.add_arguments(bench)
    backends.set_defaults(run=_backends)
    check.set_defaults(run=_check)
    plan.set_defaults(run=plan_command.run)
    bench.set_defaults(run=bench_command.run)
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has read enough: `fastac plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes out the rest at its end
        return 1
    except FastacError as error:
        print(f"fastac: {error}", file=sys.stderr)
        return 1


def _backends(options: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # plugins are imported, and may have something to say
        found = _found()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console(width=shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False)
    for table in _tables(found):
        console.print(table)
    return 0


def _tables(found: dict[str, Any]) -> list[Table]:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    libraries = _table(versions, "library", "installed", "ops", "verdict", "how it is saved, what to do")
    ops = _table("attention ops in this process, saved when they are called", "op", "of")
    owners: dict[str, list[str]] = {}
    for library in [*found["libraries"], *found["plugins"]]:
        how = "; ".join(filter(None, (library["how"], library["advice"])))
        count = str(len(library["ops"]) or "none")
        libraries.add_row(library["name"], library["installed"] or "no", count, _words(library["verdict"]), how)
        for op in library["ops"]:
            owners.setdefault(op, []).append(library["name"])
    for op, names in sorted(owners.items()):
        ops.add_row(op, ", ".join(names))
    diffusers = _table("attention backends of diffusers", "backend", "on this machine", "verdict", "what, or why not")
    for backend in sorted(found["diffusers_backends"], key=lambda one: (not one["can_be_saved"], one["name"])):
        here = CAN_BE_SAVED if backend["can_be_saved"] else "refused"
        why = "; ".join(filter(None, (backend["what"], backend["missing"])))
        diffusers.add_row(backend["name"], here, _words(backend["verdict"]), why)
    broken = _table("plugins that were left out", "plugin", "why")
    for plugin, problem in found["broken_plugins"].items():
        broken.add_row(plugin, problem)
    return [table for table in (libraries, ops, diffusers, broken) if table.row_count]


def _table(title: str, *headings: str) -> Table:
    """Its first and last columns are folded where the width asks for it, names and verdicts in between are not."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        prose = heading in ("library", headings[-1])
        number = heading in NUMBERS
        table.add_column(heading, overflow="fold", no_wrap=not prose, justify="right" if number else "left")
    return table


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _found() -> dict[str, Any]:
    """What `fastac backends` tells, as JSON has it. No library is imported for it, but plugins are."""
    interception.install()
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp)]
    return {
        "versions": {name: version(name) for name in ("fastac", "torch", "diffusers")},
        "libraries": [
            {
                "name": library.name,
                "backend": library.backend,
                "distribution": library.distribution or "torch",
                "installed": version(library.distribution or "torch"),
                "ops": sorted(op.qualified_name for op in ops if getattr(op.row, "backend", "") == library.backend),
                "verdict": library.verdict.value,
                "how": library.how,
                "advice": library.advice,
            }
            for library in LIBRARIES
        ],
        "plugins": [_plugin(plugin, ops) for plugin in plugins.installed() if not plugin.problem],
        "broken_plugins": plugins.broken(),
        "diffusers_backends": [
            {
                "name": name,
                "verdict": backend.verdict.value,
                "what": backend.reason,
                "missing": (missing := _missing(backend)),
                "can_be_saved": bool(backend.family) and missing is None,
            }
            for name, backend in BACKENDS.items()
        ],
    }


def _plugin(plugin: plugins.Plugin, ops: Sequence[registry.ResolvedOp]) -> dict[str, Any]:
    made_visible = {function.backend for function in plugin.functions}
    mine = [
        op.qualified_name
        for op in ops
        if op.row in plugin.rows or (opaque.is_opaque(op) and getattr(op.row, "backend", "") in made_visible)
    ]
    trains = any(getattr(row, "trains", True) for row in plugin.rows)
    verdict = Verdict.SAVABLE if trains else Verdict.OPAQUE if plugin.functions else Verdict.NOT_TRAINABLE
    functions = ", ".join(function.name for function in plugin.functions)
    how = ["its ops"] * trains + [f"made visible when it is loaded: {functions}"] * bool(functions)
    backends = {
        row.backend for row in (*plugin.rows, *plugin.functions) if isinstance(row, (AttentionOp, OpaqueFunction))
    }
    return {
        "name": str(plugin),
        "entry_point": plugin.value,
        "distribution": plugin.distribution,
        "installed": plugin.version,
        "backends": sorted(backends),
        "ops": sorted(mine),
        "verdict": verdict.value,
        "how": "; ".join(how),
        "advice": "",
    }


def _missing(backend: DiffusersBackend) -> str | None:
    return preflight.unavailable(backend.family, backend.op) if backend.family else None


def _check(options: argparse.Namespace) -> int:
    dtype = DTYPES[options.dtype]
    if options.all:
        return _check_all(options, dtype)
    if options.json:
        raise FastacError("check --json: it is for --all")
    row = models.MODELS.get(options.model)
    if row is None:
        raise FastacError(f"check {options.model}: no tiny model of this class. There are {', '.join(models.MODELS)}.")
    if not models.is_available(row):
        raise FastacError(f"check {options.model}: the diffusers that is installed has no such class")
    model, inputs = checks.tiny(row, dtype, options.device, options.backend)
    try:
        print(verification.verify(model, **inputs, policy=options.policy))
    except NotImplementedError as error:  # flex_attention has no backward for the CPU
        raise FastacError(f"check {options.model}: it can not be trained here: {error}") from error
    return 0


def _check_all(options: argparse.Namespace, dtype: torch.dtype) -> int:
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    found = []
    policy = str(resolve(options.policy))
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress, _quiet():
        for row in progress.track(models.MODELS.values(), description="check"):
            one = checks.check(row, options.policy, dtype, options.device, options.backend)
            found.append(one)
    if options.json:
        versions = {name: version(name) for name in ("fastac", "torch", "diffusers")}
        what = {name: getattr(options, name) for name in ("policy", "dtype", "device")} | {"policy": policy}
        rows = [dataclasses.asdict(one) for one in found]
        print(json.dumps({**what, "versions": versions, "models": rows}, indent=2))
    else:
        title = f"{policy} against no checkpointing, {options.dtype}"
        columns = ("model", "attention runs", "again", "saved", "bytes saved", "backend", "verdict", "remarks")
        table = _table(title, *columns)
        for one in found:
            counts = (str(one.attention), str(one.again), str(one.saved), readable_bytes(one.saved_bytes))
            remark = one.remark if len(one.remark) <= SHORT else "see below"
            table.add_row(one.name, *(counts if one.compared else [""] * 4), one.backend, one.verdict, remark)
        out = Console(width=max(WIDE, shutil.get_terminal_size((WIDE, 24)).columns), highlight=False, soft_wrap=True)
        out.print(table)
        for one in found:
            if len(one.remark) > SHORT:
                out.print(f"{one.name}: {one.remark}", markup=False)
        verdicts = collections.Counter(one.verdict for one in found)
        out.print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return 0 if all(one.sound for one in found) else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what fastac logs, which is in the table, and without warnings, which are the models' own."""
    logger = logging.getLogger("fastac")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
