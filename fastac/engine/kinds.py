"""Kinds of regions in this process: block class (or code of a function), policy and inputs."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from fastac.engine.blocks import MANY, BlockState, block_of, kind_of
from fastac.engine.results import RegionResult

logger = logging.getLogger("fastac")


class _State:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every kind: the next region of each is its first."""
        # Of the first region of each kind: by block class (or code), then by policy and inputs.
        self.results: weakref.WeakKeyDictionary[Any, dict[Any, RegionResult]] = weakref.WeakKeyDictionary()
        # Warnings already logged, by block class (or code).
        self.warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        # Records of functions that are no block, by their code.
        self.functions: weakref.WeakKeyDictionary[Any, BlockState] = weakref.WeakKeyDictionary()
        self.said: set[str] = set()  # what is logged once in a process
        self.of_one_block = False  # kinds are by block, not by its class (fastac.verify)


state = _State()


def state_of_function(function: Any) -> BlockState:
    """The state of a function that is no block."""
    return state.functions.setdefault(kind_of(function), BlockState())


def first_result(function: Any, key: Any) -> RegionResult | None:
    """Result of the first region of a kind; None before there was one. key: policy and inputs."""
    return _results(function).get(key)


def remember(function: Any, key: Any, result: RegionResult) -> None:
    """Note the result of the first region of a kind."""
    results = _results(function)
    if len(results) >= MANY:
        results.clear()
    results[key] = result


def compiled_result(function: Any, key: Any) -> RegionResult | None:
    """Result of compiled code under the same policy and with the same classes, whatever its inputs.

    None also where its attention was too short to be saved: what the policy saves of longer inputs was not judged.
    """
    policy, _, _, *held = key
    for (other, _, _, *others), result in _results(function).items():
        judged = not policy.min_kv or any(call.saved for call in result.calls)
        if result.compiled and judged and other == policy and others == held:
            return result
    return None


def made_before() -> set[str]:
    """Qualified names of the attention ops that regions called so far."""
    results = [result for kinds in state.results.values() for result in kinds.values()]
    return {op.qualified_name for result in results for op, _ in result.attention_calls}


def forget_kinds(function: Any) -> None:
    """Make the next region of each kind of a block's class (or code) the first."""
    state.results.pop(kind_of(function), None)


def _results(function: Any) -> dict[Any, RegionResult]:
    kind = (block_of(function) if state.of_one_block else None) or kind_of(function)
    return state.results.setdefault(kind, {})


def warn_once(function: Any, what: str, message: str) -> None:
    """Log a warning once for a block's class (or code). what: a key for the warning."""
    logged = state.warned.setdefault(kind_of(function), set())
    if what not in logged:
        logged.add(what)
        logger.warning("%s", message)


def is_first(what: str) -> bool:
    """Whether something is to be logged that is logged once in a process."""
    is_first = what not in state.said
    state.said.add(what)
    return is_first
