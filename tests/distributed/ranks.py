"""Runs a function on several ranks, each a process of its own, in a gloo process group; bounded in time.

The processes come from a server that has torch, diffusers and fastac loaded, so that they are there in a tenth of a
second. A rank that is done waits for the others before it closes its connections: gloo aborts a process whose peer goes
away in the middle of something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import faulthandler
import functools
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch", "torch.distributed", "diffusers", "tests.distributed.preloaded"]

GROUP_TIMEOUT = 30.0
"""Seconds that a collective waits for the other ranks."""

PATIENCE = 120.0
"""Seconds after which ranks that are not done are ended, and the test fails."""


@functools.cache
def _processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclasses.dataclass
class Outcome:
    """What one rank did. told: whether it came to tell; error: the traceback of what it raised; seconds: until done."""

    told: bool = False
    result: Any = None
    error: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def outcomes(
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    world: int = 2,
    timeout: float = GROUP_TIMEOUT,
    patience: float = PATIENCE,
    backend: str = "gloo",
) -> list[Outcome]:
    """Call function(*args) on every rank of a new process group, and return what each did.

    function: of a module that a new process can import. folder: for what the ranks share; timeout: of the group.
    backend: "gloo", or "nccl", where each rank has a GPU of its own.
    """
    store = folder / f"store-{time.monotonic_ns()}"
    began = time.monotonic()
    running: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world):
        mine, theirs = _processes().Pipe()
        process = _processes().Process(
            target=_rank, args=(theirs, rank, world, str(store), timeout, backend, function, args), daemon=True
        )
        process.start()
        theirs.close()
        running[mine] = rank, process
    found = [Outcome() for _ in range(world)]
    while running and (left := began + patience - time.monotonic()) > 0:
        for connection in wait(list(running), timeout=left):
            assert isinstance(connection, Connection)
            rank, process = running.pop(connection)
            outcome = found[rank]
            with contextlib.suppress(EOFError):
                outcome.result, outcome.error = pickle.loads(connection.recv_bytes())
                outcome.told = True
            process.join(max(1.0, began + patience - time.monotonic()))
            outcome.exit_code = process.exitcode
            outcome.seconds = time.monotonic() - began
    for rank, process in running.values():
        found[rank].error = f"not done after {patience} s"
        process.kill()
        process.join()
    return found


def run(folder: Path, function: Callable[..., Any], *args: Any, world: int = 2, **options: Any) -> list[Any]:
    """As `outcomes`, of ranks that all succeed: what each returned."""
    found = outcomes(folder, function, *args, world=world, **options)
    for rank, outcome in enumerate(found):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        when = "after" if outcome.told else "before"
        assert outcome.exit_code == 0, (
            f"rank {rank} ended with exit code {outcome.exit_code}, {when} it told its result"
        )
    return [outcome.result for outcome in found]


def _rank(
    connection: Connection,
    rank: int,
    world: int,
    store: str,
    timeout: float,
    backend: str,
    function: Any,
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()  # for where a rank was that is aborted
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    result, error = None, ""
    try:
        file_store, limit = dist.FileStore(store, world), dt.timedelta(seconds=timeout)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=file_store, rank=rank, world_size=world, timeout=limit)
        try:
            result = function(*args)
        except BaseException:
            error = traceback.format_exc()
        with contextlib.suppress(Exception):
            _leave_together(file_store, rank, world, None if error else limit)
    except BaseException:
        error = error or traceback.format_exc()
    connection.send_bytes(pickle.dumps((result, error)))  # copies tensors, where send would share their memory
    connection.close()


def _leave_together(store: dist.FileStore, rank: int, world: int, limit: dt.timedelta | None) -> None:
    store.set(f"done/{rank}", "")
    if limit is not None:  # one that failed does not wait
        store.wait([f"done/{other}" for other in range(world)], limit)
    dist.destroy_process_group()


@contextlib.contextmanager
def one_accelerator() -> Iterator[None]:
    """diffusers asks how many devices of the machine's accelerator there are; a CPU is one."""
    before = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = before
