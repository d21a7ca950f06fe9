"""What it costs to ask whether an op is an attention forward, once that was decided, and the first time.

python benchmarks/classification.py [--check] [--output FILE]
"""

from __future__ import annotations

import timeit

import torch
from rich.console import Console
from rich.table import Table

import fastac  # registers the rows
from common import finish, parser, positive
from fastac import registry

TARGET_NS = 200
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

OPS = {
    "an attention op": ATTENTION,
    "another op": torch.ops.aten.mm.default,
    "a higher-order op": torch.ops.higher_order.flex_attention,
}


def cached(op: object, calls: int) -> float:
    """Nanoseconds per call, the fastest of several rounds: what disturbs a measurement only ever makes it slower."""
    registry.classify(op)
    classify = registry.classify
    return min(timeit.repeat(lambda: classify(op), number=calls, repeat=9)) / calls * 1e9


def first(op: object, calls: int) -> float:
    """Nanoseconds of a decision that is not cached, the fastest of several."""

    def decide() -> None:
        registry.state.decisions.pop(op, None)
        registry.classify(op)

    return min(timeit.repeat(decide, number=1, repeat=calls)) * 1e9


def main() -> int:
    """Measure, print a table and write the result; with --check 1 when a cached decision costs more than the target."""
    arguments = parser(__doc__, "classification_cpu.json", check=f"a decision takes more than {TARGET_NS} ns")
    arguments.add_argument("--calls", type=positive, default=200_000, help="per round (default: %(default)s)")
    options = arguments.parse_args()

    results = [
        {"op": name, "cached_ns": round(cached(op, options.calls), 1), "first_ns": round(first(op, 200))}
        for name, op in OPS.items()
    ]
    table = Table(title=f"one decision, {len(registry.rows())} rows, fastac {fastac.__version__}", title_justify="left")
    for heading in ("op", "cached, ns", "first time, ns"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for row in results:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    slow = [f"{row['op']}: more than {TARGET_NS} ns" for row in results if row["cached_ns"] > TARGET_NS]
    return finish(options, {"rows": len(registry.rows()), "target_ns": TARGET_NS, "results": results}, slow)


if __name__ == "__main__":
    raise SystemExit(main())
