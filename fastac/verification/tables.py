"""Tables as text, by rich.

rich is imported when something is printed, not before: its import draws a number from Python's generator, and every
number that a training script draws after it would be another.
"""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

from fastac.engine.generators import generators_preserved

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@functools.cache
def _rich() -> tuple[type[Console], type[Table]]:
    with generators_preserved():
        from rich.console import Console
        from rich.table import Table
    return Console, Table


def new_table(title: str | None = None, caption: str | None = None) -> Table:
    """A table without columns and rows, its title and caption on the left."""
    _, table = _rich()
    return table(title=title, title_justify="left", caption=caption, caption_justify="left")


def console(**options: Any) -> Console:
    """What prints a table, or a status line. options: of rich's Console."""
    kind, _ = _rich()
    return kind(**options)


def render(table: Table) -> str:
    """A table as plain text, as wide as it needs: nothing in it is cut off."""
    text = io.StringIO()
    console(file=text, width=1000, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
