"""Peak memory of a training step as a graph with a policy, against eager mode, with a look at loss and gradients.

The peak is that of the allocator, through the profiler's memory events: what is alive at one time, and the scratch
memory of kernels. Gradients are returned by the step, so their bytes are in every figure; weights and inputs are in
none. Loss and gradients must be bitwise those of eager mode without checkpointing, else this fails.

    python benchmarks/graph_memory.py [--check]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastac
import fastac.graph
from common import allocated_bytes, finish, parser, positive
from held_bytes import CASES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.graph_models import Llama, step_of

TOKENS = 1024


def build(name: str, layers: int) -> tuple[torch.nn.Module, dict[str, Any], str | None]:
    """A model with the same weights in every call, its inputs, and what `enable` must be told of its blocks."""
    if name == "Llama":
        torch.manual_seed(0)
        return Llama(layers), {"tokens": torch.randint(100, (2, TOKENS))}, "layers"
    (case,) = (case for case in CASES if case.name == name)
    model = case.build(layers, torch.float32)
    torch.manual_seed(1)
    return model, case.inputs(torch.float32) | {"return_dict": False}, None


@dataclass(frozen=True)
class Row:
    """One way of one model. exact: loss and gradients are, bit for bit, those of eager mode without checkpointing."""

    model: str
    way: str
    policy: str
    peak: int
    over_eager: float | None
    exact: bool


def measure(name: str, layers: int) -> list[Row]:
    rows = []
    peaks: dict[str, int] = {}
    reference = None
    for way, policy in [("eager", "none"), *((w, p) for p in ("full", "attn_only") for w in ("eager", "graph"))]:
        model, inputs, blocks = build(name, layers)
        if policy != "none":
            fastac.enable(model, policy, blocks=blocks)
        step: Callable[..., Any] = step_of(model)
        if way == "graph":
            step = fastac.graph.apply(fastac.graph.trace(step, model, **inputs))
        loss, gradients = step(**inputs)  # what is built once is built now
        reference = reference or (loss, gradients)
        exact = torch.equal(loss, reference[0]) and all(map(torch.equal, gradients, reference[1]))
        del loss, gradients
        peak = allocated_bytes(functools.partial(step, **inputs)).peak
        if way == "eager":
            peaks[policy] = peak
        rows.append(Row(name, way, policy, peak, peak / peaks[policy] if way == "graph" else None, exact))
    return rows


def main() -> int:
    arguments = parser(__doc__, "graph_memory_cpu.json", check="a graph needs more than eager mode does")
    arguments.add_argument("--layers", type=positive, default=4, help="blocks per model (default: %(default)s)")
    options = arguments.parse_args()

    rows = [row for name in ("Wan", "LTX", "Llama") for row in measure(name, options.layers)]
    console = Console()
    table = Table(title=f"MiB at the peak of a training step: {options.layers} blocks, fp32")
    for heading in ("model", "policy", "way", "peak", "graph / eager"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        ratio = "" if row.over_eager is None else f"{row.over_eager:.3f}"
        table.add_row(row.model, row.policy, row.way, f"{row.peak / 2**20:.2f}", ratio)
    console.print(table)
    wrong = [f"{row.model} {row.way} {row.policy}: loss or gradients are not eager's" for row in rows if not row.exact]
    more = [row for row in rows if row.over_eager is not None and row.over_eager > 1]
    problems = [f"{row.model} {row.policy}: the graph needs more than eager mode" for row in more]
    result = {"unit": "bytes", "layers": options.layers, "results": [asdict(row) for row in rows]}
    return finish(options, result, [*wrong, *problems]) or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
