"""What takes the place of checkpointing in a trace that is neither dynamo nor AOT: marks on the nodes of a region.

A recompute in such a graph would be more of the same operators, with random numbers of its own. `fastac.graph.apply`
reads the marks and does the recomputation in the graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx.traceback import annotate

from fastac import census
from fastac.errors import FastacError
from fastac.policy import Policy

logger = logging.getLogger("fastac")

REGION = "fastac_region"
"""Key in a node's `meta["custom"]`: the number of its region, unique in the process and growing."""

# Texts and numbers: they can be stored.
_POLICY, _MIN_KV, _COLLECTIVES, _WHERE = "fastac_policy", "fastac_min_kv", "fastac_collectives", "fastac_block"

_numbers = itertools.count(1)
_expected: contextvars.ContextVar[bool] = contextvars.ContextVar("expected", default=False)
_blocks: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def run_annotated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> Any:
    """Call a function whose operators the trace is to know as one region; as it is where gradients are off."""
    if policy.linear:
        raise FastacError(
            f"{policy}: outputs of Linear modules are for eager mode; this is a trace. Use a policy of "
            f'attention in it, such as "long_attn_only".'
        )
    if not _expected.get():
        _tell()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    number = next(_numbers)
    block = census.block_of(function)
    if block is not None:
        _blocks[number] = block
    marks = {
        REGION: number,
        _POLICY: policy.name,
        _MIN_KV: policy.min_kv,
        _COLLECTIVES: policy.collectives,
        _WHERE: census.describe(function),
    }
    with annotate(marks):
        return function(*args, **kwargs)


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """In which a trace is one that is meant for `fastac.graph.apply`, and needs no warning."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


@functools.cache
def _tell() -> None:
    logger.warning(
        "a trace that is neither dynamo nor AOT: checkpointed regions are marked in it, and nothing is recomputed "
        "until fastac.graph.apply is called on the graph"
    )


def policy_of(marks: Mapping[str, Any]) -> Policy:
    """The policy a region was checkpointed with, from the marks on one of its nodes."""
    return Policy(marks[_POLICY], marks[_MIN_KV], marks[_COLLECTIVES])


def where(marks: Mapping[str, Any]) -> str:
    """The region's block or function, for messages."""
    return str(marks[_WHERE])


def block_of(number: int) -> torch.nn.Module | None:
    """The block of a region, as long as it lives; None for a function."""
    return _blocks.get(number)
