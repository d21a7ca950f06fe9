"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from fastac.errors import FastacError

UNITS = {"": 1, "b": 1}
UNITS.update({f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)})
UNITS.update({f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)})


def parse_bytes(text: str | int) -> int:
    """A number of bytes: 1234, "24GiB" (24 * 2**30), "24 GB" (24 * 10**9), "1.5GiB". Raises FastacError."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    found = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([a-z]*)\s*", text.lower()) if isinstance(text, str) else None
    unit = UNITS.get(found[3]) if found else None
    if found is None or unit is None or (found[2] and unit == 1):
        raise FastacError(f'{text!r}: expected bytes, as in 1234, "512MiB", "24GiB" (2**30 each) or "24GB" (10**9)')
    return int(Fraction(found[1] + (found[2] or "")) * unit)


def readable_bytes(count: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
