"""Kinds of regions: those that should make the same attention calls, so that only the first of them is observed."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fastac.engine.blocks import MANY, BlockState, block_of, code_of
from fastac.engine.process import process
from fastac.engine.results import Kind, RegionResult

logger = logging.getLogger("fastac")

SIGNATURES = 4
"""So many input signatures that differ only in shapes are observed, if their regions make the same calls; twice as many
if not. After that, regions of any other shapes are one kind."""


def state_of_function(function: Any) -> BlockState:
    """The state of a function that is not a block."""
    return process.functions.setdefault(code_of(function), BlockState())


def kind_of(function: Any, key: tuple[object, ...]) -> Kind:
    """The kind of a region of a function. key: as in `Kind`."""
    known = _kinds_of(function)
    kind = known.get(key)
    if kind is None:
        kind = _kind_of_any_shape(known, key)
    if kind is None:
        if len(known) >= MANY:
            known.clear()
        kind = known[key] = Kind(key)
    return kind


def _kind_of_any_shape(known: dict[object, Kind], key: tuple[object, ...]) -> Kind | None:
    """The kind of all regions whose inputs differ from those of a key only in shapes; None before enough were observed.

    A run whose lengths never repeat would observe every region otherwise.
    """
    without_shapes = _without_shapes(key)
    kind = known.get(without_shapes)
    if kind is None:
        alike = [kind for kind in known.values() if kind.is_judged and _without_shapes(kind.key) == without_shapes]
        results = [kind.first for kind in alike if kind.first is not None]
        enough = SIGNATURES if len({result.ops for result in results}) == 1 else 2 * SIGNATURES
        if len(results) >= enough:
            # Its own key has no shapes, so it is never one of those that are alike.
            kind = known[without_shapes] = Kind(without_shapes, min(results, key=lambda result: len(result.ops)))
    return kind


def _without_shapes(value: Any) -> Any:
    """A signature with the number of dimensions in the place of each shape."""
    if isinstance(value, torch.Size):
        return len(value)
    return tuple([_without_shapes(item) for item in value]) if type(value) is tuple else value


def compiled_result(function: Any, key: tuple[Any, ...]) -> RegionResult | None:
    """Result of compiled code under the same policy and with the same classes, whatever its inputs; None without."""
    policy, _, _, *classes = key
    for (other, _, _, *others), kind in [(kind.key, kind) for kind in _kinds_of(function).values()]:
        if kind.first is not None and kind.first.compiled and kind.is_judged and (other, others) == (policy, classes):
            return kind.first
    return None


def ops_called() -> set[str]:
    """Qualified names of the attention ops that regions called so far."""
    results = [kind.first for known in process.kinds.values() for kind in known.values() if kind.first is not None]
    return {op.qualified_name for result in results for op, _ in result.attention_calls}


def forget_kinds(function: Any) -> None:
    """Make the next region of each kind of a block's class (or code) the first."""
    process.kinds.pop(code_of(function), None)


def _kinds_of(function: Any) -> dict[object, Kind]:
    code = (block_of(function) if process.kinds_are_of_one_block else None) or code_of(function)
    return process.kinds.setdefault(code, {})


def warn_once(function: Any, what: str, message: str) -> None:
    """Log a warning once for a block's class (or code). what: a key for the warning."""
    logged = process.warned.setdefault(code_of(function), set())
    if what not in logged:
        logged.add(what)
        logger.warning("%s", message)


def is_first(what: str) -> bool:
    """Whether something is to be logged that is logged once in a process."""
    is_first = what not in process.said
    process.said.add(what)
    return is_first
