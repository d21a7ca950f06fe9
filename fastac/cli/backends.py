"""fastac backends: every attention library and backend, and how its outputs are saved on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastac import registry
from fastac.backends import LIBRARIES, availability, plugins
from fastac.backends.diffusers import BACKENDS, DiffusersBackend
from fastac.backends.verdicts import Verdict
from fastac.cli.measuring import version
from fastac.engine import interception
from fastac.registry import AttentionOp
from fastac.verification.tables import console, new_table

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100
"""Columns of the tables where there is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fastac backends`."""
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the tables, or the JSON."""
    with contextlib.redirect_stdout(sys.stderr):  # plugins are imported, and may print
        found = _found()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    output = console(width=shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False)
    for table in _tables(found):
        output.print(table)
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
        here = "can be saved" if backend["can_be_saved"] else "refused"
        why = "; ".join(filter(None, (backend["what"], backend["missing"])))
        diffusers.add_row(backend["name"], here, _words(backend["verdict"]), why)
    broken = _table("plugins that were left out", "plugin", "why")
    for plugin, problem in found["broken_plugins"].items():
        broken.add_row(plugin, problem)
    return [table for table in (libraries, ops, diffusers, broken) if table.row_count]


def _table(title: str, *headings: str) -> Table:
    """A table whose first and last columns are folded to the width; names and verdicts in between are not."""
    table = new_table(title)
    for heading in headings:
        prose = heading in ("library", headings[-1])
        table.add_column(heading, overflow="fold", no_wrap=not prose)
    return table


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _found() -> dict[str, Any]:
    """The content of the tables, as JSON has it. It imports plugins, and no library."""
    interception.install()
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp)]
    return {
        "versions": {name: version(name) for name in ("fastac", "torch", "diffusers")},
        "libraries": [
            dataclasses.asdict(library)
            | {
                "distribution": library.distribution or "torch",
                "installed": version(library.distribution or "torch"),
                "ops": sorted(op.qualified_name for op in ops if getattr(op.row, "backend", "") == library.backend),
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
                "missing": (
                    missing := availability.unavailable(backend.family, backend.op) if backend.family else None
                ),
                "can_be_saved": bool(backend.family) and missing is None,
            }
            for name, backend in _backends_of_diffusers().items()
        ],
    }


def _backends_of_diffusers() -> dict[str, DiffusersBackend]:
    """Backends that the installed diffusers has: none before 0.35. Its file is read, and not imported."""
    spec = importlib.util.find_spec("diffusers")
    path = Path(spec.origin).parent / "models" / "attention_dispatch.py" if spec and spec.origin else None
    text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    return {name: backend for name, backend in BACKENDS.items() if f'"{name}"' in text}


def _plugin(plugin: plugins.Plugin, ops: Sequence[registry.BoundOp]) -> dict[str, Any]:
    made_visible = {function.backend for function in plugin.functions}
    mine = [
        op for op in ops if op.row in plugin.rows or (op.is_opaque and getattr(op.row, "backend", "") in made_visible)
    ]
    trains = any(getattr(row, "trains", True) for row in plugin.rows)
    verdict = Verdict.SAVABLE if trains else Verdict.OPAQUE if plugin.functions else Verdict.NOT_TRAINABLE
    functions = ", ".join(function.name for function in plugin.functions)
    how = ["its ops"] * trains + [f"made visible when it is loaded: {functions}"] * bool(functions)
    return {
        "name": str(plugin),
        "installed": plugin.version,
        "ops": sorted(op.qualified_name for op in mine),
        "verdict": verdict.value,
        "how": "; ".join(how),
        "advice": "",
    }
