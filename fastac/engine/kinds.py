"""What is known in this process of regions of one kind: block class, or code of a function; policy; and inputs."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from fastac.engine.blocks import MANY, BlockRecord, block_of, kind_of
from fastac.engine.calls import RegionResult

logger = logging.getLogger("fastac")


class _State:
    """What this module knows.

    results: of the first region of each kind, by block class (or code), then by policy and inputs.
    warned: warnings that were logged already, by block class (or code).
    functions: records of functions that are no block, by their code.
    of_one_block: kinds are those of a block, not of its class (fastac.verify).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every kind: the next region of each is its first."""
        self.results: weakref.WeakKeyDictionary[Any, dict[Any, RegionResult]] = weakref.WeakKeyDictionary()
        self.warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.functions: weakref.WeakKeyDictionary[Any, BlockRecord] = weakref.WeakKeyDictionary()
        self.of_one_block = False


state = _State()


def record_of_function(function: Any) -> BlockRecord:
    """What is known of a function that is no block."""
    return state.functions.setdefault(kind_of(function), BlockRecord())


def first_result(function: Any, key: Any) -> RegionResult | None:
    """What the first region of a kind did; None before that. key: policy and inputs."""
    return _results(function).get(key)


def remember(function: Any, key: Any, result: RegionResult) -> None:
    """Note what the first region of a kind did."""
    results = _results(function)
    if len(results) >= MANY:
        results.clear()
    results[key] = result


def forget(function: Any) -> None:
    """The next region of each kind of a block's class (or code) is its first."""
    state.results.pop(kind_of(function), None)


def _results(function: Any) -> dict[Any, RegionResult]:
    kind = (block_of(function) if state.of_one_block else None) or kind_of(function)
    found = state.results.get(kind)
    if found is None:
        found = state.results[kind] = {}
    return found


def warn_once(function: Any, what: str, message: str) -> None:
    """Log a warning, once for a block's class (or code). what: names it."""
    said = state.warned.setdefault(kind_of(function), set())
    if what not in said:
        said.add(what)
        logger.warning("%s", message)
