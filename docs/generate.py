"""Writes docs/support.md from the catalogues; `tests/test_docs.py` fails when the file is stale.

python docs/generate.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import fastac  # registers the rows
from fastac import registry
from fastac.backends.diffusers import BACKENDS
from fastac.models import MODELS
from fastac.rows import AttentionOp, Verdict

SUPPORT = Path(__file__).parent / "support.md"


def support() -> str:
    """The support matrix as Markdown."""
    rows = [row for row in registry.rows() if isinstance(row, AttentionOp)]
    families = {row.backend for row in rows}
    order = list(Verdict)
    listed = sorted(BACKENDS.items(), key=lambda item: (order.index(item[1].verdict), item[0]))
    return (
        "\n\n".join(
            (
                "<!-- Written by docs/generate.py. Do not edit. -->",
                "# What is supported",
                f"fastac {fastac.__version__}. What a machine really has: `fastac backends`.",
                "## Attention backends of diffusers",
                _table(
                    ("backend", "verdict", "in this version", "what it is, or why not"),
                    (
                        (
                            f"`{name}`",
                            backend.verdict.value.replace("_", " "),
                            "saved"
                            if backend.family in families
                            else ("refused: no rows yet" if backend.family else "refused"),
                            backend.reason,
                        )
                        for name, backend in listed
                    ),
                ),
                "## Attention ops",
                _table(
                    ("op", "rows of", "layout of keys", "draws random numbers"),
                    (
                        (f"`{row.namespace}::{row.name}`", row.backend, row.layout, row.dropout or "never")
                        for row in rows
                    ),
                ),
                "## Models with a catalogue row",
                "Every other diffusers model with gradient checkpointing goes through the generic reading.",
                _table(
                    ("class", "block containers"),
                    ((f"`{name}`", ", ".join(f"`{c}`" for c in row.containers)) for name, row in MODELS.items()),
                ),
            )
        )
        + "\n"
    )


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    SUPPORT.write_text(support(), encoding="utf-8")
