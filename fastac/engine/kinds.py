"""Kinds of regions: those that should make the same attention calls, so that only the first of them is observed."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from fastac.engine.blocks import MANY, BlockState, block_of, code_of
from fastac.engine.process import process
from fastac.engine.results import Kind, RegionResult

logger = logging.getLogger("fastac")

SIGNATURES = 4
"""So many input signatures that differ only in shapes are observed, if their regions make the same calls; twice as many
if not. After that, regions of any other shapes are one kind: of smaller shapes only, if the policy saved nothing in
those that were observed, because their attention was too short."""


def state_of_function(function: Any) -> BlockState:
    """The state of a function that is not a block."""
    # A closure is a new function in each call. Its code is what stays.
    functions, code = process.functions, code_of(function)
    state = functions.get(code)
    return functions.setdefault(code, BlockState()) if state is None else state


def kind_of(function: Any, key: tuple[object, ...]) -> Kind:
    """The kind of a region of a function. key: as in `Kind`."""
    known = _kinds_of(function)
    kind = known.get(key)
    if kind is None:
        kind = _kind_of_any_shape(known, key)
    if kind is None:
        # Shapes and lengths are bounded by SIGNATURES. Flags and classes among the inputs are part of the key as well.
        if len(known) >= MANY:
            known.clear()
        kind = known[key] = Kind(key)
    return kind


def _kind_of_any_shape(known: dict[object, Kind], key: tuple[object, ...]) -> Kind | None:
    """The kind of all regions whose inputs differ from those of a key only in shapes; None before enough were observed.

    A run whose lengths never repeat would observe every region otherwise.
    """
    shapeless = without_shapes(key)
    kind = known.get(shapeless)
    if kind is None or not _covers(kind, key):
        # A copy of the values: other threads may add kinds. A key without shapes is never one of those that are alike.
        alike = [kind for kind in list(known.values()) if kind.first and without_shapes(kind.key) == shapeless]
        judged = [kind for kind in alike if kind.is_judged]
        kind = _common(shapeless, judged, math.inf)
        if kind is None:
            # Attention in them was too short to be saved. A smaller input cannot make it longer.
            kind = _common(shapeless, alike, max((elements_in(kind.key) for kind in alike), default=0))
        if kind is not None:
            known[shapeless] = kind
    return kind if kind is not None and _covers(kind, key) else None


def _common(key: tuple[object, ...], alike: Sequence[Kind], elements: float) -> Kind | None:
    """A kind for what these kinds have in common; None if these are too few. elements: the most of inputs it covers."""
    results = [kind.first for kind in alike if kind.first is not None]
    if len(results) < SIGNATURES * (1 if len({result.ops for result in results}) == 1 else 2):
        return None
    # A later region that makes more calls than this is not a sign of hidden attention; one that makes fewer is watched.
    fewest = min(results, key=lambda result: result.count)
    # Each length may take a path of its own. The report names what runs again in any of them.
    unknown = dict.fromkeys(name for result in results for name in result.unknown)
    return Kind(key, dataclasses.replace(fewest, unknown=tuple(unknown)), elements)


def _covers(kind: Kind, key: object) -> bool:
    return kind.elements == math.inf or elements_in(key) <= kind.elements


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
    return tuple(dict.fromkeys(items) if depth > 1 else items)


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
