"""Rows of other packages: entry points of the group `fastac.backends`, in the package's pyproject.toml.

    [project.entry-points."fastac.backends"]
    my_kernel = "my_kernel.fastac_rows"

An entry point names a module, whose ROWS and FUNCTIONS are registered; or an object in a module: an iterable of rows
and OpaqueFunctions, or a function that returns one. Plugins are loaded when interception is first installed, not at
`import fastac`, which they import themselves. A broken plugin is left out as a whole and named; the others are
registered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import threading
import types
from collections.abc import Iterable
from typing import Any

from fastac import registry
from fastac.backends import opaque
from fastac.engine import interception
from fastac.engine.beginning import generators_preserved
from fastac.errors import FastacError
from fastac.registry import OpaqueFunction, Row, flops

logger = logging.getLogger("fastac")

GROUP = "fastac.backends"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One entry point, and the rows that it brought."""

    name: str
    value: str
    distribution: str
    version: str
    rows: tuple[Row, ...] = ()
    functions: tuple[OpaqueFunction, ...] = ()
    problem: str = ""
    """Why nothing of the plugin is registered; "" if all of it is."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


_plugins: list[Plugin] = []
# Reentrant, because a plugin that is being imported may use fastac, which asks for the plugins again.
_loading = threading.RLock()
_begun = _done = False


def load_plugins() -> None:
    """Register the rows of the installed plugins, once. Other threads wait for it.

    If it is interrupted (Ctrl-C in a slow plugin), the next call loads what is left.
    """
    global _begun, _done
    if _done:
        return
    with _loading:
        # Another thread has loaded them by now, or a plugin that is being imported calls this.
        if _begun:
            return
        _begun = True
        try:
            # Always in one order: a load that was interrupted goes on behind the plugins that it had finished.
            points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
            # A library may draw random numbers when it is imported.
            with generators_preserved() if points else contextlib.nullcontext():
                _plugins.extend(_load(point) for point in points[len(_plugins) :])
            _done = True
        finally:
            # After an error the next call must begin again.
            _begun = _done


def installed() -> tuple[Plugin, ...]:
    """Every plugin of this environment, including broken ones. Loads them if they are not loaded yet."""
    load_plugins()
    return tuple(_plugins)


def broken() -> dict[str, str]:
    """The plugins that were left out, as `name (distribution version)`, and why."""
    return {str(plugin): plugin.problem for plugin in installed() if plugin.problem}


def _load(entry_point: importlib.metadata.EntryPoint) -> Plugin:
    distribution = entry_point.dist
    plugin = Plugin(
        name=entry_point.name,
        value=entry_point.value,
        distribution=distribution.name if distribution is not None else "unknown distribution",
        version=distribution.version if distribution is not None else "",
    )
    try:
        items = _read(entry_point)
        functions = tuple(item for item in items if isinstance(item, OpaqueFunction))
        rows = tuple(item for item in items if not isinstance(item, OpaqueFunction))
        # Everything is checked before anything is known: a broken plugin is left out as a whole.
        for function in functions:
            registry.check_row(function, "OpaqueFunction")
        registry.register(*rows)  # all of them, or none if one is refused
        opaque.know(*functions)
    except FastacError as error:
        logger.error("plugin %s = %r left out: %s", plugin, plugin.value, error)
        logger.debug("plugin %s", plugin, exc_info=True)
        return dataclasses.replace(plugin, problem=str(error))
    logger.info("plugin %s: %d rows, %d functions", plugin, len(rows), len(functions))
    return dataclasses.replace(plugin, rows=rows, functions=functions)


def _read(entry_point: importlib.metadata.EntryPoint) -> list[Any]:
    """The rows and functions of an entry point. Raises FastacError, whatever goes wrong."""
    try:
        loaded = entry_point.load()
        if isinstance(loaded, types.ModuleType):
            if not (hasattr(loaded, "ROWS") or hasattr(loaded, "FUNCTIONS")):
                raise FastacError("the module has neither ROWS nor FUNCTIONS")
            return [item for name in ("ROWS", "FUNCTIONS") for item in getattr(loaded, name, ())]
        content: Iterable[Any] = loaded() if callable(loaded) else loaded
        return list(content)
    except (Exception, SystemExit) as error:
        # Other people's code runs here: its library may be uninstalled, a driver may be missing, or it calls sys.exit
        # without a GPU. None of that may stop a training that may not even use that kernel.
        raise FastacError(f"it cannot be loaded: {type(error).__name__}: {error}") from error


def prepare() -> None:
    """Load plugins, make known kernels visible, intercept every op with a row, and have torch count its FLOPs."""
    # Plugins come first: the other two look for what the plugins brought.
    load_plugins()
    opaque.make_known_visible()
    flops.register_formulas(interception.install())
