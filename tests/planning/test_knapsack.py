"""What blocks save for a number of bytes: against all subsets, and on models of real size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastac.planning import knapsack
from fastac.planning.knapsack import Marks, choose_outputs
from fastac.planning.timeline import Candidate

GIB = 2**30
Blocks = dict[str, list[Candidate]]


def saved_of(outputs: Sequence[Candidate], marks: Marks) -> list[Candidate]:
    bound = min((mark for mark in marks if isinstance(mark, int)), default=float("inf"))
    return [out for out in outputs if (out.keys >= bound if out.keys else out.name in marks)]


def total(blocks: Blocks, chosen: dict[str, Marks]) -> tuple[int, int]:
    """Bytes and flops of what all blocks save."""
    saved = [out for name, marks in chosen.items() for out in saved_of(blocks[name], marks)]
    return sum(out.bytes for out in saved), sum(out.flops for out in saved)


def possible(outputs: Sequence[Candidate]) -> set[tuple[int, int]]:
    names = sorted({out.name for out in outputs if not out.keys})
    subsets = [set(taken) for count in range(len(names) + 1) for taken in itertools.combinations(names, count)]
    sums = set()
    for bound in [float("inf"), *(out.keys for out in outputs if out.keys)]:
        for taken in subsets:
            saved = [out for out in outputs if (out.keys >= bound if out.keys else out.name in taken)]
            sums.add((sum(out.bytes for out in saved), sum(out.flops for out in saved)))
    return sums


def all_sums(blocks: Blocks) -> set[tuple[int, int]]:
    sums = {(0, 0)}
    for outputs in blocks.values():
        sums = {(a + b, f + g) for a, f in sums for b, g in possible(outputs)}
    return sums


def best(sums: set[tuple[int, int]], limit: int) -> tuple[int, int]:
    """Of these bytes and flops those of most flops within a limit, with fewest bytes."""
    return max((pair for pair in sums if pair[0] <= limit), key=lambda pair: (pair[1], -pair[0]))


def outputs_of_blocks() -> Any:
    """Up to three Linear modules, some called twice, and up to three attention calls. Many sizes are equal, some 0."""
    size = st.integers(0, 6)
    return st.lists(
        st.builds(Candidate, st.sampled_from("abc"), size, size)
        | st.builds(Candidate, st.just("sdpa"), size, size, st.sampled_from([7, 512, 1024])),
        max_size=5,
    )


@st.composite
def random_blocks(draw: Any) -> Blocks:
    """Up to four blocks of up to two kinds."""
    kinds = draw(st.lists(outputs_of_blocks(), min_size=1, max_size=2))
    return {f"blocks.{n}": kind for n, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=4)))}


def examples(number: int) -> Any:
    """The settings of a property: so many examples, the same in every run."""
    return settings(max_examples=number, derandomize=True, deadline=None, database=None)


LIMITS = st.integers(0, 60)


@examples(150)
@given(random_blocks(), LIMITS)
def test_no_other_choice_saves_more(blocks: Blocks, limit: int) -> None:
    """Also for sizes of gigabytes, to the byte."""
    assert total(blocks, choose_outputs(blocks, limit)) == best(all_sums(blocks), limit)
    large = {
        name: [dataclasses.replace(out, bytes=out.bytes * 10**9 + out.flops) for out in outputs]
        for name, outputs in blocks.items()
    }
    limit = limit * 10**9 + limit // 2
    assert total(large, choose_outputs(large, limit)) == best(all_sums(large), limit)


@examples(150)
@given(random_blocks(), LIMITS)
def test_of_two_equal_blocks_the_earlier_saves_a_subset(blocks: Blocks, limit: int) -> None:
    chosen = choose_outputs(blocks, limit)
    assert list(chosen) == list(blocks)
    for name, marks in chosen.items():
        assert marks <= {out.keys or out.name for out in blocks[name]}
        assert sum(isinstance(mark, int) for mark in marks) <= 1
    for earlier, later in itertools.combinations(blocks, 2):
        if (outputs := blocks[earlier]) == blocks[later]:
            first, last = (saved_of(outputs, chosen[name]) for name in (earlier, later))
            assert all(out in last for out in first)


def test_no_blocks_and_no_outputs() -> None:
    assert choose_outputs({}, 9) == {}
    assert choose_outputs({"block": []}, 9) == {"block": set()}


def test_a_thinned_list_stays_within_the_limit_and_near_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that save as much per byte: nearly every sum of sizes is undominated."""
    sizes = Random(0).choices(range(GIB // 8), k=20)
    blocks = {f"blocks.{n}": [Candidate("q", size, 1000 * size)] for n, size in enumerate(sizes)}
    limit = GIB // 2
    _, exact = total(blocks, choose_outputs(blocks, limit))
    monkeypatch.setattr(knapsack, "POINTS", 2000)
    size, flops = total(blocks, choose_outputs(blocks, limit))
    assert 0.98 * limit < size <= limit
    assert 0.98 * exact < flops <= exact
