"""Reading the tables that commands print."""

from __future__ import annotations


def cells_of(table: str) -> dict[str, list[str]]:
    """First cell of each row -> the others."""
    return {row[0]: row[1:] for line in table.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])}
