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


@pytest.mark.parametrize(
    ("budget", "gathers", "held"),
    [(0.3, 28, 241_664), pytest.param(1.0, 26, 702_464, marks=pytest.mark.slow)],
)
def test_gathers_attention_and_saved_bytes_are_those_of_the_first_compile(
    budget: float, gathers: int, held: int
) -> None:
    first, second = compiled_twice(True, budget, cse=budget < 1)
    assert second.figures == first.figures == ((4, 0), (29, gathers), held)
