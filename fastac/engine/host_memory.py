"""Checks that the host has the memory that offload needs."""

from __future__ import annotations

import os
from pathlib import Path

from fastac.engine.process import process
from fastac.errors import FastacError, readable_bytes
from fastac.policy import Policy

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes available on this host, or in its container (cgroup v2); None if neither is known."""
    # A container has its own limit, which MemAvailable does not show. Beyond it the kernel kills the process.
    limits = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        # memory.current counts the page cache (a data loader's files) as used. The kernel frees it on demand.
        cache = int(stat["inactive_file"]) + int(stat["active_file"])
        limits.append(limit - used + cache)
    except (OSError, KeyError, ValueError):  # not Linux; or the limit is "max", which is none
        pass
    return min(limits, default=None)


def ranks_on_host() -> int:
    """The number of processes on this host that train together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun


def check_available(size: int, blocks: int, policy: Policy) -> None:
    """Raise FastacError if the host has too little memory for its ranks.

    Args:
        size: bytes that each rank is going to hold there. Memory is looked up once for each larger size.
        blocks: number of blocks that hold them, for the message.
    """
    if size <= process.host_bytes:
        return
    host = available()
    # The size that fitted is allocated by now, and missing in what is available.
    if host is not None and ranks_on_host() * (size - process.host_bytes) > host:
        raise FastacError(
            f"{policy}: {blocks} blocks keep {size / 2**30:.1f} GiB in host memory, on {ranks_on_host()} ranks "
            f"{ranks_on_host() * size / 2**30:.1f} GiB, and {host / 2**30:.1f} GiB are available.\n"
            f"{_way_out(policy)}"
        )
    process.host_bytes = size


def exhausted(size: int, where: str, policy: Policy, error: BaseException) -> FastacError:
    """The error for host memory that cannot be pinned.

    Args:
        size: bytes that were asked for.
        where: the block that offloads them.
        error: what torch raised. It may read like an error of the device.
    """
    host = available()
    left = "" if host is None else f" {readable_bytes(host)} are available; the limit of pinned memory may be lower."
    return FastacError(
        f"{policy}: the host has no memory left to pin for {readable_bytes(size)} that {where} offloads "
        f"({type(error).__name__}: {str(error).partition(chr(10))[0]}).{left}\n{_way_out(policy)}"
    )


def _way_out(policy: Policy) -> str:
    less = 'only offload="attention" or "inputs", ' if policy.offload is True and policy.is_selective else ""
    return (
        f"Offload less: {less}a larger keep= (now {policy.keep}), offload for fewer blocks (a mapping of block names), "
        f"or none; or run fewer ranks on a host."
    )
