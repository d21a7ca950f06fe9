from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Output:
    name: str
    bytes: int
    flops: int
    keys: int = 0


@dataclasses.dataclass(frozen=True)
class Choice:
    min_kv: int | None
    linear: tuple[str, ...]
    bytes: int
    flops: int


def parse_bytes(text):
    if isinstance(text, int):
        return text
    for unit, n in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if text.endswith(unit):
            return int(float(text[:-3]) * n)
    return int(text)


def readable_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def choose(blocks: Mapping[str, Sequence[Output]], limit: int) -> dict[str, Choice]:
    items = []
    for b, outs in blocks.items():
        for name in {o.name for o in outs if not o.keys}:
            mine = [o for o in outs if o.name == name and not o.keys]
            items.append((sum(o.flops for o in mine), sum(o.bytes for o in mine), b, name, 0))
        for o in outs:
            if o.keys:
                items.append((o.flops, o.bytes, b, o.name, o.keys))
    items = [i for i in items if i[0]]
    items.sort(key=lambda i: -i[0] / max(1, i[1]))
    got = {b: [] for b in blocks}
    for i in items:
        if i[1] <= limit:
            limit -= i[1]
            got[i[2]].append(i)
    return {
        b: Choice(
            min([i[4] for i in g if i[4]], default=None),
            tuple(sorted({i[3] for i in g if not i[4]})),
            sum(i[1] for i in g),
            sum(i[0] for i in g),
        )
        for b, g in got.items()
    }
