"""docs/graph.md: its code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastac.graph
from fastac import PolicyNotAppliedError
from tests import support
from tests.graph.steps import attention_nodes

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "graph.md"


@pytest.mark.slow
def test_the_code_of_the_guide_runs_and_does_what_it_says() -> None:
    blocks = support.code_blocks(GUIDE, "python")
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    support.count_cpu_attention()
    support.executions.clear()
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)  # what it compiles is compiled at the first call
    assert support.executions.total() == 2 * 4, "two steps of four attention calls"
    assert len(attention_nodes(names["mixed"].graph_module)) == 4 + 2
    assert len(attention_nodes(names["graph_module"])) == len(attention_nodes(names["as_enabled"].graph_module)) == 4
    expected, found = names["step"](**names["inputs"]), names["train"](**names["inputs"])
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))


def test_every_public_name_is_explained() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (GUIDE, GUIDE.with_name("round_trip.md")))
    assert not [name for name in fastac.graph.__all__ if name not in text]
    assert PolicyNotAppliedError.__name__ in text
