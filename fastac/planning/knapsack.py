"""The outputs that every block saves for a budget of bytes: a knapsack, solved exactly by lists of undominated sums.

Outputs of equal bytes and flops are interchangeable, so the knapsack only counts them. Their blocks are chosen
afterwards. A table over bytes would need a cell for every multiple of the greatest common divisor of all sizes: for Wan
14B 37 million cells of 10 KiB. But only 0.3 million of its sums, at most, are not beaten by a sum with no more bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastac.planning.timeline import Candidate

POINTS = 2**19
"""The longest list of sums that is not thinned. A longer list keeps the best sum in each of so many intervals of bytes.

The choice then saves at least as many FLOPs as any choice under a limit that is lower by 1 + limit / POINTS for each
step of the solution: by 0.02 % of it for LTX-2, with about 120 steps. The lists of Wan 14B are shorter. So are
those of HunyuanVideo, unless its modulation is listed: outputs of one token, whose few bytes make a sum for every gap.
"""

Marks = set[str | int]
"""Saved outputs of one block: names of Linear modules, and the fewest keys over which attention is saved."""

Levels = tuple[tuple[int, int], ...]
"""Bytes and flops at each level of a part, ascending from (0, 0), which saves nothing."""


Part = tuple[str, tuple[str | int, ...]]
"""One decision about a block: the block, and the marks of the levels above (0, 0).

The marks are the name of a Linear module, or numbers of keys.
"""


class EqualParts(NamedTuple):
    """Parts with equal levels. All of them take the same level."""

    levels: Levels
    number: int


def choose_outputs(blocks: Mapping[str, Sequence[Candidate]], limit: int) -> dict[str, Marks]:
    """For each block, the outputs to save so that recompute costs the fewest FLOPs within `limit` bytes.

    Of equally good choices, one with the fewest bytes.

    blocks: name -> outputs, in the order of the forward. A block saves all attention over at least some number of keys,
    or none; it saves all calls of a Linear module, or none. If not all blocks can save an output, the last blocks save
    it: backward releases their outputs first. So of two blocks with equal outputs the earlier one saves a subset.
    """
    pools = _pools(blocks)
    steps = _steps(pools)
    sums = Sums(steps, limit)
    chosen: dict[Levels, list[int]] = {levels: [] for levels in pools}
    # The last sum has the most flops.
    for step, level in zip(steps, sums.levels(len(steps), len(sums.bytes[-1]) - 1), strict=True):
        chosen[step.levels] += [level] * step.number
    marks_of: dict[str, Marks] = {block: set() for block in blocks}
    for levels, parts in pools.items():
        # The parts of a pool begin with those of the last block, which get the highest levels.
        for (block, marks), level in zip(parts, sorted(chosen[levels], reverse=True), strict=True):
            if level:
                marks_of[block].add(marks[level - 1])
    return marks_of


def _pools(blocks: Mapping[str, Sequence[Candidate]]) -> dict[Levels, list[Part]]:
    """Levels -> all parts that have them and save any flops, the parts of the last block first."""
    pools: dict[Levels, list[Part]] = {}
    for block, outputs in reversed(list(blocks.items())):
        for levels, marks in ladders(outputs):
            pools.setdefault(levels, []).append((block, marks))
    return pools


def ladders(outputs: Sequence[Candidate]) -> list[tuple[Levels, tuple[str | int, ...]]]:
    """The parts of one block that save any flops: their levels, and the marks of the levels above (0, 0)."""
    # A ladder is a list of marks, each of which includes those before it. A Linear module has a ladder of one rung.
    names = dict.fromkeys(out.name for out in outputs if not out.keys)
    rungs: list[tuple[str | int, ...]] = [(name,) for name in names]
    # Attention has one ladder: first over the most keys, which saves the most flops for a byte, then over fewer.
    rungs.append(tuple(sorted({out.keys for out in outputs if out.keys}, reverse=True)))
    parts = []
    for marks in rungs:
        levels = [(0, 0)]
        for mark in marks:
            added = [out for out in outputs if mark == (out.keys or out.name)]
            size, flops = levels[-1]
            levels.append((size + sum(out.bytes for out in added), flops + sum(out.flops for out in added)))
        if levels[-1][1]:
            parts.append((tuple(levels), marks))
    return parts


def _steps(pools: Mapping[Levels, Sequence[Part]]) -> list[EqualParts]:
    """Steps that can bring every number of parts to every level.

    With one level above nothing, chunks of 1, 2, 4, ... parts make up all numbers. With more, each part is a step.
    """
    steps = []
    # Single parts come first, then large ones: the lists are still short. Small parts fill the gaps in between.
    for levels in sorted(pools, key=lambda levels: (len(levels) > 2, levels[-1]), reverse=True):
        rest, chunk = len(pools[levels]), 1
        while rest:
            steps.append(EqualParts(levels, min(rest, chunk)))
            rest -= steps[-1].number
            chunk *= 2 if len(levels) == 2 else 1
    return steps


class Sums:
    """Bytes and flops of all undominated sums of the first steps, by number of steps; the last are those of all steps.

    A sum stays in the list if no other has as many flops and no more bytes. Sums ascend in both.

    Args:
        limit: the most bytes of a sum.
        points: the longest list that is not thinned, as `POINTS`.
        every: whether the sums of fewer steps than all stay, too.
        before: for each level of each step, the largest sum of the steps before it; by default any within `limit`.
    """

    def __init__(
        self,
        steps: Sequence[EqualParts],
        limit: int,
        points: int = POINTS,
        every: bool = False,
        before: Sequence[Sequence[int]] = (),
    ) -> None:
        import numpy as np  # not before a plan: the rest of fastac needs none

        sums, flops = np.zeros(1, np.int64), np.zeros(1, np.int64)
        limit = min(limit, sum(step.levels[-1][0] * step.number for step in steps))
        unit = limit // points + 1
        self.bytes, self.flops = [sums], [flops]
        # For each step, the origins of its sums. They are indices into one list: the sums of the step before, repeated
        # for every level. With them stands the index at which each level starts in that list.
        self._origins: list[tuple[Any, Any]] = []
        for index, (levels, number) in enumerate(steps):
            added = [(size * number, gain * number) for size, gain in levels]
            largest = [limit - size for size, _ in added]
            if before:
                largest = list(map(min, largest, before[index]))
            # ends: for each level, how many of the sums so far can take it and stay within the limits.
            ends = [int(end) for end in np.searchsorted(sums, largest, side="right")]
            reached = np.concatenate([sums[:end] + size for end, (size, _) in zip(ends, added, strict=True)])
            gained = np.concatenate([flops[:end] + gain for end, (_, gain) in zip(ends, added, strict=True)])
            # By bytes, ascending: a sum stays if it has more flops than every sum before it.
            order = np.argsort(reached, kind="stable")
            order = order[np.diff(np.maximum.accumulate(gained[order]), prepend=-1) > 0]
            # Flops ascend now, so of sums with equal bytes, or in one interval of them, the last is the best.
            interval = reached[order] if len(order) <= points else -(-reached[order] // unit)
            order = order[np.diff(interval, append=-1) != 0]
            sums, flops = reached[order], gained[order]
            if not every:
                self.bytes, self.flops = [], []
            self.bytes.append(sums)
            self.flops.append(flops)
            self._origins.append((order.astype(np.int32), np.cumsum([0, *ends[:-1]])))

    def levels(self, count: int, point: int) -> list[int]:
        """The level of each of the first `count` steps in one of their sums. point: the index of the sum."""
        levels = []
        # Walk back from the sum: its origin says which level each step took.
        for origin, starts in reversed(self._origins[:count]):
            levels.append(int(starts.searchsorted(origin[point], side="right")) - 1)
            point = int(origin[point] - starts[levels[-1]])
        return levels[::-1]
