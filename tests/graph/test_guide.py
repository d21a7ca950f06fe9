"""docs/graph.md: its code runs, and its table is what the benchmark found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

import fastac.graph
from fastac import PolicyNotAppliedError
from tests import support
from tests.graph.steps import attention_nodes

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "graph.md"


def test_the_code_of_the_guide_runs_and_does_what_it_says() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
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


def test_the_table_of_memory_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "graph_memory_cpu.json").read_text())
    measured = {(row["model"], row["policy"], row["way"]): row["peak"] / 2**20 for row in result["results"]}
    assert all(row["exact"] for row in result["results"])
    columns = [("none", "eager"), *((policy, way) for policy in ("full", "attn_only") for way in ("eager", "graph"))]
    rows = re.findall(r"^\| (Wan|LTX|Llama)(?:-like)? \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == ["Wan", "LTX", "Llama"]
    for name, cells in rows:
        *peaks, ratio = cells.split(" | ")
        assert peaks == [f"{measured[(name, *column)]:.1f}" for column in columns]
        graph, eager = measured[name, "attn_only", "graph"], measured[name, "attn_only", "eager"]
        assert ratio == f"{graph / eager:.2f}"
