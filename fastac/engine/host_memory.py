"""Checks that the host has the memory that offload needs."""

from __future__ import annotations

import os
from pathlib import Path

from fastac.errors import FastacError

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


class _State:
    fits = 0  # the largest size of a rank that passed the check


_state = _State()


def available() -> int | None:
    """Bytes available on this host, or in its container (cgroup v2); None if neither is known."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        cache = int(stat["inactive_file"]) + int(stat["active_file"])  # the kernel frees it on demand
        found.append(limit - used + cache)
    except (OSError, KeyError, ValueError):  # another system; "max" for a container without a limit
        pass
    return min(found, default=None)


def check(size: int, blocks: int, policy: object) -> None:
    """Raise FastacError if the host has too little memory for its ranks.

    Args:
        size: bytes that each rank is going to keep there. Memory is looked up once for each larger size.
        blocks: number of blocks that keep them, for the message.
    """
    if size <= _state.fits:
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    host = available()
    if host is not None and ranks * (size - _state.fits) > host:  # what fitted before is allocated by now
        raise FastacError(
            f"{policy}: {blocks} blocks keep {size / 2**30:.1f} GiB in host memory, on {ranks} ranks "
            f"{ranks * size / 2**30:.1f} GiB, and {host / 2**30:.1f} GiB are available.\n"
            f'Offload less: offload="inputs" or "attention", or policy="full"; or run fewer ranks on a host.'
        )
    _state.fits = size
