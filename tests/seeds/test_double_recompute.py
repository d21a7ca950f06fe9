"""The case of "Fix double recomputation in torch.compile round-trip": a sharded language model, compiled twice."""

from __future__ import annotations

import pytest
import torch

from fastac import graph
from tests.graph.partitioned import Split, min_cut, round_trip, sharded
from tests.graph.partitioned import eight_ranks as eight_ranks
from tests.graph_models import Llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eight_ranks")]


def compiled_twice(guarded: bool, budget: float, cse: bool) -> tuple[Split, Split]:
    """Both partitions. guarded: the second replays the first. budget: memory budget of the first min-cut."""
    model, args = sharded(Llama(words=128)), (torch.randint(128, (2, 32)),)
    second = graph.replaying_partitioner if guarded else min_cut
    return round_trip(model, args, graph.partitioner("attn_only"), second, budget=budget, cse=cse)[:2]


FIRST = {0.3: ((4, 0), (21, 21), 223_488), 1.0: ((4, 0), (21, 21), 612_640)}


@pytest.mark.parametrize("budget", FIRST)
def test_gathers_attention_and_saved_bytes_are_those_of_the_first_compile(budget: float) -> None:
    first, second = compiled_twice(True, budget, cse=budget < 1)
    assert second.figures == first.figures == FIRST[budget]


@pytest.mark.parametrize(
    ("budget", "cse", "gathers"), [(0.3, True, (21, 21)), (1.0, True, (21, 21)), (1.0, False, (42, 21))]
)
def test_min_cut_undoes_what_the_first_compile_chose(budget: float, cse: bool, gathers: tuple[int, int]) -> None:
    first, second = compiled_twice(False, budget, cse)
    assert first.figures == FIRST[budget]
    assert second.figures == ((4, 0), gathers, 612_640)
