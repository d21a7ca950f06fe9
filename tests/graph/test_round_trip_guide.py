"""docs/round_trip.md: its code runs, and every row of its table is measured again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

from fastac import FastacError, Policy, graph
from tests.graph.partitioned import (
    Partitioned,
    Split,
    Watched,
    compiled_again,
    fake_process_group,
    gradients_of,
    llama,
    min_cut,
    round_trip,
)
from tests.graph.test_round_trip import wan
from tests.support import CPU_ATTENTION

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "round_trip.md"
REPLAY = graph.replaying_partitioner


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
    ):
        yield
    torch._dynamo.reset()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run(numbers: list[int], calls: str) -> None:
    """Run blocks of the guide, and what they compiled once more, with a look at its gradients."""
    names: dict[str, Any] = {}
    for number in numbers:
        exec(compile(blocks()[number], str(GUIDE), "exec"), names)
    model = names["model"]
    model.zero_grad()
    names[calls](*names["args"]).square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    (names["Video"](model))(*names["args"]).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert all((found[name] - expected[name]).abs().max() < 1e-4 * scale for name in expected)


def test_the_code_of_the_guide_runs(attention_executions: Counter[str]) -> None:
    assert len(blocks()) == 3
    run([0], "compiled")
    assert attention_executions[CPU_ATTENTION] == 3 * 4, "in the guide, here, and in eager mode; none again"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(1, "by_inductor"), (2, "plain")])
def test_the_code_with_inductor_runs(number: int, name: str, attention_executions: Counter[str]) -> None:
    run([0, number], name)
    assert attention_executions[CPU_ATTENTION] == 4 * 4


def test_a_mapping_of_blocks_is_refused() -> None:
    with pytest.raises(FastacError, match=r"a joint graph has no blocks\. Give a name or a fastac\.Policy"):
        graph.partitioner({"blocks.0": "full", "*": "attn_only"})  # type: ignore[arg-type]
    graph.partitioner(Policy("attn_only", min_kv=8))


# The table


def table() -> list[tuple[str, str]]:
    """Its rows: what, and the rest."""
    rows = re.findall(r"^\| (\w.*?) \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(what, rest.replace("*", "")) for what, rest in rows]


def as_row(split: Split) -> str:
    """4+0 | 29+26 | 702,464"""
    attention, gathers, size = split.figures
    cells = ["+".join(map(str, attention)), "+".join(map(str, gathers)) if any(gathers) else "", f"{size:,}"]
    return " | ".join(cells).replace("|  |", "| |")


def splits(make: Any, second: Any, **options: Any) -> tuple[str, str]:
    """The rows of both partitions of one step."""
    torch._dynamo.reset()
    first = options.pop("first", graph.partitioner("attn_only"))
    model, args = make()
    once, again, _ = round_trip(model, args, first, second, **options)
    return as_row(once), as_row(again)


@pytest.mark.slow
@pytest.mark.usefixtures("uninformed")
def test_the_rows_of_llama_are_what_is_measured() -> None:
    rows = table()[:8]
    with fake_process_group():
        bare, _ = splits(llama, min_cut, first=graph.partitioner("attn_only", recompute_gathers=False))
        first, second = splits(llama, min_cut)
        _, without_cse = splits(llama, min_cut, cse=False)
        replayed = {splits(llama, REPLAY, cse=cse)[1] for cse in (True, False)}
        small, small_second = splits(llama, min_cut, budget=0.3)
        _, small_replayed = splits(llama, REPLAY, budget=0.3)
    assert rows == [
        ("Llama, first partition without the guard", bare),
        ("Llama, first partition", first),
        ("second, min-cut", second),
        ("second, min-cut, without common subexpression elimination", without_cse),
        ("second, replayed, either way", *replayed),
        ("Llama, first under `activation_memory_budget=0.3`", small),
        ("second, min-cut", small_second),
        ("second, replayed", small_replayed),
    ]


def through_inductor(second: Any) -> str:
    """The row of inductor's partition, after a first one under a budget of 0.2."""
    torch._dynamo.reset()
    model, args = wan()
    with torch._functorch.config.patch(activation_memory_budget=0.2):
        once = Partitioned(model, args, graph.partitioner("attn_only"))
    again = Watched(second)
    with torch._inductor.config.patch(custom_partitioner_fn=again):
        gradients_of(model, torch.compile(once, backend="inductor"), args)
    return as_row(again.split)


@pytest.mark.slow
@pytest.mark.usefixtures("uninformed")
def test_the_rows_of_wan_are_what_is_measured() -> None:
    first, second = splits(wan, min_cut, budget=0.2)
    _, replayed = splits(wan, REPLAY, budget=0.2)
    by_inductor = [through_inductor(partition) for partition in (min_cut, REPLAY)]
    torch._dynamo.reset()
    model, args = wan()
    again = Watched(min_cut)
    once = Partitioned(model, args, min_cut)
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        gradients_of(model, compiled_again(once, again), args)
    assert table()[8:] == [
        ("Wan, first under a budget of 0.2", first),
        ("second, min-cut", second),
        ("second, replayed", replayed),
        ("second, inductor's min-cut", by_inductor[0]),
        ("second, inductor, replayed", by_inductor[1]),
        ("Wan, both by min-cut, second under a budget of 0.1", as_row(again.split)),
    ]
