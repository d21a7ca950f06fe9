"""Outputs that blocks could save, in one list: first those that avoid the most FLOPs of recompute for a byte.

What is chosen for a limit is the longest beginning of the list that fits, and behind it what is small enough for the
rest.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fastac.planning.timeline import Candidate


class Output(NamedTuple):
    """All calls of a Linear module of one block, or all its attention over so many keys."""

    block: str
    # Name of the Linear module, or number of keys.
    mark: str | int
    bytes: int
    flops: int


def ranked(outputs: Mapping[str, Sequence[Candidate]]) -> list[Output]:
    """All outputs that avoid FLOPs, the most for a byte first. Of equal ones, those of the last block come first.

    Backward releases the outputs of the last blocks first.

    outputs: block name -> outputs, in the order of the forward.
    """
    found = []
    for block, listed in reversed(outputs.items()):
        sizes, flops = Counter[str | int](), Counter[str | int]()
        for out in listed:
            sizes[out.keys or out.name] += out.bytes
            flops[out.keys or out.name] += out.flops
        found += [Output(block, mark, sizes[mark], flops[mark]) for mark in sizes if flops[mark]]
    return sorted(found, key=lambda out: (-out.flops / max(1, out.bytes), -out.bytes, str(out.mark)))


Fits = Callable[[Sequence[Output]], bool]
"""Whether outputs fit together. If they do, so do fewer of them."""


def longest(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """What was taken, and the longest beginning of a list that fits beside it."""
    ends = range(1, len(listed) + 1)
    count = bisect.bisect_left(ends, True, key=lambda end: not fits([*taken, *listed[:end]]))
    return [*taken, *listed[:count]]


def filled(listed: Sequence[Output], fits: Fits, taken: Sequence[Output] = ()) -> list[Output]:
    """The same, and then of each run of equal outputs behind it as many as fit."""
    chosen = longest(listed, fits, taken)
    rest = listed[len(chosen) - len(taken) :]
    for _, run in itertools.groupby(rest, key=lambda out: (out.bytes, out.mark)):
        chosen = longest(list(run), fits, chosen)
    return chosen
