"""Tables as text, by rich.

rich is imported when something is printed, not before: its import draws a number from Python's generator, which would
change every number that a training script draws afterwards.
"""

from __future__ import annotations

import functools
import io
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastac.engine.beginning import generators_preserved
from fastac.errors import parse_bytes, readable_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@functools.cache
def _rich() -> tuple[type[Console], type[Table]]:
    with generators_preserved():
        from rich.console import Console
        from rich.table import Table
    return Console, Table


def width() -> int:
    """Columns of the terminal; 80 if there is none, as in a pipe, a log or a notebook."""
    return shutil.get_terminal_size((80, 24)).columns


def wrapped(text: str) -> str:
    """Break the lines of a text between words if they are wider than the terminal."""
    # Without `or`, empty lines would be lost: textwrap makes no line of them.
    lines = (textwrap.wrap(line, width(), break_on_hyphens=False) or [line] for line in text.splitlines())
    return "\n".join(part for parts in lines for part in parts)


def new_table(title: str | None = None, *headings: str, **options: Any) -> Table:
    """A table without rows, its title and caption on the left. options: more arguments of rich's Table."""
    _, table = _rich()
    return table(*headings, title=title, title_justify="left", caption_justify="left", **options)


def console(**options: Any) -> Console:
    """A rich.console.Console, which prints tables and status lines. options: its arguments."""
    console_class, _ = _rich()
    return console_class(**options)


def render(table: Table) -> str:
    """A table as plain text, no wider than the terminal: a text too long for its column continues in the next line."""
    for column in table.columns:
        # By default rich cuts a long word, such as the name of an op, and ends it with an ellipsis.
        column.overflow = "fold"
    text = io.StringIO()
    # A report is pasted into logs and issues: it has no colors and no escape codes.
    console(file=text, width=width(), force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def table_of_figures(
    title: str, captions: Sequence[str], headings: Sequence[str], texts: Collection[str] = ()
) -> Table:
    """A table with figures, but words in the first column and in the columns with the headings `texts`."""
    table = new_table(title, caption="\n".join(captions))
    for heading in headings:
        is_text = heading in (headings[0], *texts)
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    table.columns[0].min_width = len("long_attn_only")
    return table


def unit_of(sizes: Iterable[int]) -> str:
    """The largest unit in which every number of bytes, unless it is 0, is at least 1."""
    return readable_bytes(min(filter(None, sizes), default=0)).split()[1]


def in_unit(size: int, unit: str) -> str:
    """A number of bytes in a unit, without it."""
    return f"{size / parse_bytes(f'1{unit}'):,.1f}" if size else "0"
