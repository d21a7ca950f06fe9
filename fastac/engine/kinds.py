"""Kinds of regions: those that should make the same attention calls, so that only the first of them is observed."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from fastac.engine.blocks import MANY, BlockState, block_of, code_of
from fastac.engine.process import process
from fastac.engine.results import Kind, RegionResult

logger = logging.getLogger("fastac")

SIGNATURES = 8
"""So many input signatures that differ only in shapes and lengths are observed. After that, all others are one kind."""


def state_of_function(function: Any) -> BlockState:
    """The state of a function that is not a block."""
    # A closure is a new function in each call. Its code is what stays.
    functions, code = process.functions, code_of(function)
    state = functions.get(code)
    return functions.setdefault(code, BlockState()) if state is None else state


def kind_of(function: Any, key: tuple[object, ...]) -> Kind:
    """The kind of a region of a function. key: as in `Kind`."""
    known = _kinds_of(function)
    if key not in known:
        shapeless = without_shapes(key)
        # A copy of the values: other threads may add kinds.
        alike = [kind for kind in list(known.values()) if without_shapes(kind.key) == shapeless]
        # Regions whose attention was too short to be saved say nothing of longer ones.
        if sum(kind.is_judged or elements_in(kind.key) >= elements_in(key) for kind in alike) >= SIGNATURES:
            key = shapeless
        elif len(known) >= MANY:  # flags and classes among the inputs are part of the key as well
            key = (key[0], None, None, *key[3:])
    return known.setdefault(key, Kind(key))


def elements_in(value: Any) -> float:
    """Number of elements of all tensors in a signature; infinite for a nested tensor, whose lengths are not known."""
    if isinstance(value, torch.Size):
        return math.prod(value) if all(type(length) is int for length in value) else math.inf
    return sum(map(elements_in, value)) if type(value) is tuple else 0


def without_shapes(value: Any, depth: int = 0) -> Any:
    """A key with the number of dimensions in the place of each shape, without the lengths of containers and names.

    depth: 0 for the key, 1 for the arguments, 2 for what is inside one of them.
    """
    if isinstance(value, torch.Size):
        return len(value)
    if type(value) is not tuple:
        return "" if isinstance(value, str) else value
    items = [without_shapes(item, depth + 1) for item in value]
    return frozenset(items) if depth > 1 else tuple(items)


def compiled_result(function: Any, key: tuple[Any, ...]) -> RegionResult | None:
    """Result of compiled code under the same policy and with the same classes, whatever its inputs; None without."""
    policy, _, _, *classes = key
    # A copy: threads that train blocks of the same class add kinds meanwhile.
    for kind in list(_kinds_of(function).values()):
        other, _, _, *others = kind.key
        if kind.first is not None and kind.first.compiled and kind.is_judged and (other, others) == (policy, classes):
            return kind.first
    return None


def ops_called() -> set[str]:
    """Qualified names of the attention ops that regions called so far."""
    kinds = [kind for known in list(process.kinds.values()) for kind in list(known.values())]
    results = [kind.first for kind in kinds if kind.first is not None]
    return {op.qualified_name for result in results for op, _ in result.attention_calls}


def forget_kinds(function: Any) -> None:
    """Make the next region of each kind of a block's class (or code) the first."""
    process.kinds.pop(code_of(function), None)


def _kinds_of(function: Any) -> dict[object, Kind]:
    # fastac.verify observes each block, so that attention which only a later one hides is found.
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
