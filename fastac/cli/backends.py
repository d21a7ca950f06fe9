"""fastac backends: every attention library and backend, and how its outputs are saved on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastac import registry
from fastac.backends import LIBRARIES, plugins
from fastac.backends.diffusers import BACKENDS, DiffusersBackend, unavailable
from fastac.backends.verdicts import Verdict
from fastac.cli import version
from fastac.diagnosis.tables import new_table, render
from fastac.engine import interception
from fastac.registry import AttentionOp

if TYPE_CHECKING:
    from rich.table import Table

# A rule stands between rows, since a row has several lines.
_table = functools.partial(new_table, show_lines=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fastac backends`."""
    parser.add_argument("--all", action="store_true", help="also what is not installed, or cannot run here")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the tables, or the JSON."""
    # Plugins are imported for this, and may print: that must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        content = _content()
    if options.json:
        print(json.dumps(content, indent=2))
        return 0
    hidden = 0 if options.all else _leave_out_absent(content)
    for table in _tables(content):
        print(render(table))
    if hidden:
        print(f"not installed, or cannot run here: {hidden} more (--all)")
    return 0


def _leave_out_absent(content: dict[str, Any]) -> int:
    """Leave out libraries that are not installed, and backends that cannot run here. Returns how many these are."""
    libraries = [library for library in content["libraries"] if library["installed"]]
    names = ("_native", *(library["backend"] for library in libraries if library["distribution"] != "torch"))

    def is_present(backend: dict[str, Any]) -> bool:
        can_run = not backend["missing"] and backend["verdict"] != "unknown"
        # The name of a diffusers backend contains that of the library that it calls.
        return backend["can_be_saved"] or (can_run and any(name in backend["name"] for name in names))

    backends = list(filter(is_present, content["diffusers_backends"]))
    hidden = len(content["libraries"]) - len(libraries) + len(content["diffusers_backends"]) - len(backends)
    content |= {"libraries": libraries, "diffusers_backends": backends}
    return hidden


def _tables(content: dict[str, Any]) -> list[Table]:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    libraries = _table(versions, "library", "how it is saved, what to do")
    ops = _table("attention ops in this process, saved when they are called", "by library")
    for library in [*content["libraries"], *content["plugins"]]:
        here = f"{library['installed']}, {len(library['ops']) or 'no'} ops" if library["installed"] else "not installed"
        how = "; ".join(filter(None, (library["how"], library["advice"])))
        libraries.add_row(f"{library['name']}\n{here}", f"{library['verdict'].replace('_', ' ')}: {how}")
        if library["ops"]:
            ops.add_row("\n".join((library["name"], *(f"  {op}" for op in library["ops"]))))
    diffusers = _table("attention backends of diffusers", "backend", "on this machine, what it is, or why not")
    # Many backends have the same description: they share a row, with a line for each name.
    backends: dict[str, list[str]] = {}
    for backend in sorted(content["diffusers_backends"], key=lambda row: (not row["can_be_saved"], row["name"])):
        here = "can be saved" if backend["can_be_saved"] else f"refused, {backend['verdict'].replace('_', ' ')}"
        why = "; ".join(filter(None, (backend["what"], backend["missing"])))
        backends.setdefault(f"{here}: {why}", []).append(backend["name"])
    for why, names in backends.items():
        diffusers.add_row("\n".join(names), why)
    broken = _table("plugins that were left out", "plugin", "why")
    for plugin, problem in content["broken_plugins"].items():
        broken.add_row(plugin, problem)
    return [table for table in (libraries, ops, diffusers, broken) if table.row_count]


def _content() -> dict[str, Any]:
    """The content of the tables, as in the JSON. Plugins are imported, libraries are not."""
    # If another package has taken an op, this raises here as it would at `enable`.
    interception.install()
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp)]
    return {
        "versions": {name: version(name) for name in ("fastac", "torch", "diffusers")},
        "libraries": [
            dataclasses.asdict(library)
            | {
                "distribution": library.distribution or "torch",
                # The metadata says this without an import: a CUDA library may be installed and not importable here.
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
                "missing": (missing := unavailable(backend) if backend.family else None),
                "can_be_saved": bool(backend.family) and missing is None,
            }
            for name, backend in _backends_of_diffusers().items()
        ],
    }


def _backends_of_diffusers() -> dict[str, DiffusersBackend]:
    """Backends that the installed diffusers has: none before 0.35. Its file is read: an import would load libraries."""
    spec = importlib.util.find_spec("diffusers")
    path = Path(spec.origin).parent / "models" / "attention_dispatch.py" if spec and spec.origin else None
    text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    return {name: backend for name, backend in BACKENDS.items() if f'"{name}"' in text}


def _plugin(plugin: plugins.Plugin, ops: Sequence[registry.BoundOp]) -> dict[str, Any]:
    made_visible = {function.backend for function in plugin.functions}
    # An op that fastac made of a plugin's Function has a row of fastac, not one of the plugin's rows.
    plugin_ops = [
        op for op in ops if op.row in plugin.rows or (op.is_opaque and getattr(op.row, "backend", "") in made_visible)
    ]
    trains = any(getattr(row, "trains", True) for row in plugin.rows)
    verdict = Verdict.SAVABLE if trains else Verdict.OPAQUE if plugin.functions else Verdict.NOT_TRAINABLE
    functions = ", ".join(function.name for function in plugin.functions)
    how = ["its ops"] * trains + [f"made visible when it is loaded: {functions}"] * bool(functions)
    return {
        "name": str(plugin),
        "installed": plugin.version,
        "ops": sorted(op.qualified_name for op in plugin_ops),
        "verdict": verdict.value,
        "how": "; ".join(how),
        "advice": "",
    }
