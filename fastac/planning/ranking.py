"""Outputs that blocks could save, in one list: first those that avoid the most FLOPs of recompute for a byte.

What is chosen for a limit is the longest beginning of the list that fits, and behind it what is small enough for the
rest.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fastac.planning.timeline import Candidate


class Output(NamedTuple):
    """What one mark saves in one block: all calls of a Linear module, or attention over so many keys."""

    block: str
    # Name of the Linear module, or number of keys.
    mark: str | int
    bytes: int
    flops: int


Fits = Callable[[Sequence[Output]], bool]
"""Whether outputs fit together. If they do, so do fewer of them."""


def ranked(outputs: Mapping[str, Sequence[Candidate]]) -> list[Output]:
    """All outputs that avoid FLOPs, the most for a byte first. Of equal ones, those of the last block come first.

    Backward releases the outputs of the last block first.

    outputs: block name -> outputs, in the order of the forward.
    """
    found = []
    for block in reversed(list(outputs)):
        sizes, flops = Counter[str | int](), Counter[str | int]()
        for out in outputs[block]:
            sizes[out.keys or out.name] += out.bytes
            flops[out.keys or out.name] += out.flops
        found += [Output(block, mark, sizes[mark], flops[mark]) for mark in sizes if flops[mark]]
    # Equal outputs of all blocks stand together.
    return sorted(found, key=lambda out: (-out.flops / max(1, out.bytes), -out.bytes, str(out.mark)))


def longest(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """What was taken, and the longest beginning of a list that fits beside it."""
    ends = range(1, len(listed) + 1)
    count = bisect.bisect_left(ends, True, key=lambda end: not fits([*taken, *listed[:end]]))
    return [*taken, *listed[:count]]


def filled(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """The same, and behind that beginning, of each group of equal outputs as many as fit."""
    chosen = longest(listed, fits, taken)
    rest = listed[len(chosen) - len(taken) :]
    for _, group in itertools.groupby(rest, key=lambda out: (out.mark, out.bytes)):
        equal = list(group)
        if fits([*chosen, equal[0]]):  # mostly not: this saves a bisection
            chosen = longest(equal, fits, chosen)
    return chosen


def marks_of(chosen: Iterable[Output]) -> defaultdict[str, set[str | int]]:
    """Block name -> the marks of its outputs."""
    marks = defaultdict[str, set[str | int]](set)
    for out in chosen:
        marks[out.block].add(out.mark)
    return marks
