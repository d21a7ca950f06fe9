"""The case of "Fix double recomputation in torch.compile round-trip": a sharded language model, compiled twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastac import graph
from tests.graph.partitioned import Split, fake_process_group, llama, min_cut, round_trip


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    with fake_process_group():
        yield


def compiled_twice(guarded: bool, budget: float, cse: bool) -> tuple[Split, Split]:
    """Both partitions. guarded: the second replays the first. budget: memory budget of the first min-cut."""
    model, args = llama()
    second = graph.replaying_partitioner if guarded else min_cut
    return round_trip(model, args, graph.partitioner("attn_only"), second, budget=budget, cse=cse)[:2]


FIRST = {0.3: ((4, 0), (29, 28), 241_664), 1.0: ((4, 0), (29, 26), 702_464)}


@pytest.mark.parametrize("budget", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_gathers_attention_and_saved_bytes_are_those_of_the_first_compile(budget: float) -> None:
    first, second = compiled_twice(True, budget, cse=budget < 1)
    assert second.figures == first.figures == FIRST[budget]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "cse", "gathers"), [(0.3, True, (29, 26)), (1.0, True, (29, 26)), (1.0, False, (55, 26))]
)
def test_min_cut_undoes_what_the_first_compile_chose(budget: float, cse: bool, gathers: tuple[int, int]) -> None:
    first, second = compiled_twice(False, budget, cse)
    assert first.figures == FIRST[budget]
    assert second.figures == ((4, 0), gathers, 702_464)
