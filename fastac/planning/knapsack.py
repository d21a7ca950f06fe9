"""The outputs that every block saves for a budget of bytes: a knapsack, solved exactly by lists of undominated sums.

Outputs of equal bytes and flops are interchangeable, so the knapsack only counts them; their blocks are chosen
afterwards. A table over bytes would need a cell for every multiple of the greatest common divisor of all sizes, 37
million of 10 KiB for Wan 14B, while at most 0.3 million of its sums are not beaten by another one with no more bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastac.planning.timeline import Candidate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Integers = npt.NDArray[np.int64]

POINTS = 2**19
"""The longest list of sums that is kept whole. Of a longer one the best stays in each of so many intervals of bytes.

The choice then saves at least as much as any choice under a limit that is lower by 1 + limit / POINTS for each step of
the solution: by 0.02 % of it for LTX-2, with about 120 steps. The lists of Wan 14B are shorter than this, and those of
HunyuanVideo unless its modulation is listed: outputs of one token, whose few bytes make a sum for every gap.
"""

Marks = set[str | int]
"""Saved outputs of one block: names of Linear modules, and a number of keys from which on attention is saved."""

_Levels = tuple[tuple[int, int], ...]
"""Bytes and flops at each level of a part, ascending from (0, 0), which saves nothing."""


_Part = tuple[str, tuple[str | int, ...]]
"""One decision about a block: the block, and the marks of the levels above (0, 0).

The marks are the name of a Linear module, or numbers of keys.
"""


class _EqualParts(NamedTuple):
    """Parts of equal levels, which take the same level."""

    levels: _Levels
    copies: int  # number of parts


def choose_outputs(blocks: Mapping[str, Sequence[Candidate]], limit: int) -> dict[str, Marks]:
    """The saved outputs of every block that save most flops within `limit` bytes; of such choices one of fewest bytes.

    blocks: name -> outputs, in the order of the forward. In a block attention is saved from some number of keys on, or
    not at all; calls of one Linear module are saved together. If not all blocks can save an output, the last ones do,
    whose outputs backward releases first; so of two blocks with equal outputs the earlier saves a subset of the
    later's.
    """
    pools = _pools(blocks)
    steps = _steps(pools)
    sums, _, origins = _undominated(steps, limit)
    chosen: dict[_Levels, list[int]] = {levels: [] for levels in pools}
    point = len(sums) - 1
    for step, (origin, starts) in zip(reversed(steps), reversed(origins), strict=True):
        level = int(starts.searchsorted(origin[point], side="right")) - 1
        point = int(origin[point] - starts[level])
        chosen[step.levels] += [level] * step.copies
    found: dict[str, Marks] = {block: set() for block in blocks}
    for levels, parts in pools.items():
        for (block, marks), level in zip(parts, sorted(chosen[levels], reverse=True), strict=True):
            if level:
                found[block].add(marks[level - 1])
    return found


def frontier(blocks: Mapping[str, Sequence[Candidate]], points: int = 33) -> list[tuple[int, int]]:
    """Bytes and flops saved of the best choices for `points` (2 or more) limits, evenly spread from 0 to everything.

    Limits with the same best choice are one point. All are from one list, which `POINTS` bounds as it does in `choose`.
    """
    sums, flops, _ = _undominated(_steps(_pools(blocks)), sys.maxsize)
    limits = [int(sums[-1]) * number // (points - 1) for number in range(points)]
    indices = dict.fromkeys(sums.searchsorted(limits, side="right") - 1)
    return [(int(sums[index]), int(flops[index])) for index in indices]


def _pools(blocks: Mapping[str, Sequence[Candidate]]) -> dict[_Levels, list[_Part]]:
    """The parts of all blocks that save any flops, by their levels, those of the last block first."""
    pools: dict[_Levels, list[_Part]] = {}
    for block, outputs in reversed(list(blocks.items())):
        names = dict.fromkeys(out.name for out in outputs if not out.keys)
        ladders: list[tuple[str | int, ...]] = [(name,) for name in names]
        ladders.append(tuple(sorted({out.keys for out in outputs if out.keys}, reverse=True)))
        for marks in ladders:
            levels = [(0, 0)]
            for mark in marks:
                held = [out for out in outputs if mark == (out.keys or out.name)]
                size, flops = levels[-1]
                levels.append((size + sum(out.bytes for out in held), flops + sum(out.flops for out in held)))
            if levels[-1][1]:
                pools.setdefault(tuple(levels), []).append((block, marks))
    return pools


def _steps(pools: Mapping[_Levels, Sequence[_Part]]) -> list[_EqualParts]:
    """Steps that can bring every number of parts to every level.

    With one level above nothing, chunks of 1, 2, 4, ... parts make up all numbers; with more the parts go one by one.
    """
    steps = []
    # Parts that go one by one come first, then large ones, while lists are short. Small ones fill the gaps in between.
    for levels in sorted(pools, key=lambda levels: (len(levels) > 2, levels[-1]), reverse=True):
        rest, chunk = len(pools[levels]), 1
        while rest:
            steps.append(_EqualParts(levels, min(rest, chunk)))
            rest -= steps[-1].copies
            chunk *= 2 if len(levels) == 2 else 1
    return steps


def _undominated(steps: Sequence[_EqualParts], limit: int) -> tuple[_Integers, _Integers, list[tuple[Any, Any]]]:
    """Bytes and flops of all sums within a limit for which no other sum has as many flops and no more bytes, ascending.

    And for each step the origins of its sums: indices into the sums of the step before, repeated for every level, and
    the index at which each level starts.
    """
    import numpy as np  # not before a plan: the rest of fastac needs none

    sums, flops = np.zeros(1, np.int64), np.zeros(1, np.int64)
    limit = min(limit, sum(step.levels[-1][0] * step.copies for step in steps))
    unit = limit // POINTS + 1
    origins = []
    for levels, copies in steps:
        ends = [int(np.searchsorted(sums, limit - size * copies, side="right")) for size, _ in levels]
        reached = np.concatenate([sums[:end] + size * copies for end, (size, _) in zip(ends, levels, strict=True)])
        gained = np.concatenate([flops[:end] + gain * copies for end, (_, gain) in zip(ends, levels, strict=True)])
        order = np.argsort(reached, kind="stable")
        order = order[np.diff(np.maximum.accumulate(gained[order]), prepend=-1) > 0]
        # Flops ascend now, so of sums with equal bytes, or in one interval of them, the last is the best.
        interval = reached[order] if len(order) <= POINTS else -(-reached[order] // unit)
        order = order[np.diff(interval, append=-1) != 0]
        sums, flops = reached[order], gained[order]
        origins.append((order.astype(np.int32), np.cumsum([0, *ends[:-1]])))
    return sums, flops, origins
