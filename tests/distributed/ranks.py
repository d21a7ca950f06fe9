"""Runs functions on several ranks, each a process in one gloo or NCCL process group. Every wait is bounded.

A pool of ranks serves every test, and is replaced when a rank raised, died or was late. Tests that break ranks on
purpose get new ones. They are forked by a server that has torch, diffusers and fastac loaded; those of NCCL start anew.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

PRELOADED = ["diffusers.models.transformers.transformer_wan", "tests.conftest", "tests.distributed.steps"]
"""What the server has loaded. Nothing in it may start a thread."""

GROUP_TIMEOUT = dt.timedelta(minutes=3)
"""How long a collective waits for the other ranks."""

DIED = "ended with exit code"

PATIENCE = 270.0
"""Seconds after which ranks that are not done are ended, and the test fails."""


class Outcome(NamedTuple):
    """What one rank did. error: the traceback of what it raised, or why there is no result."""

    result: Any = None
    error: str = ""


class Pool:
    """Ranks that call one function after another. backend: "gloo", or "nccl", with a GPU for each rank."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.folder = tempfile.mkdtemp(prefix="fastac-ranks-")
        self.sound = True
        self.ranks: list[tuple[Connection, Any]] = []
        processes = _processes(backend)
        for rank in range(world):
            mine, theirs = processes.Pipe()
            args = theirs, rank, world, str(Path(self.folder, "store")), backend
            process = processes.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((mine, process))

    def call(self, function: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> list[Outcome]:
        """Call a function of an importable module on every rank. Unless all return in time, the pool is not sound."""
        self.sound, deadline = False, time.monotonic() + patience
        for connection, _ in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(pickle.dumps((function, args)))
        found = [self._outcome(rank, deadline) for rank in range(len(self.ranks))]
        self.sound = not any(outcome.error for outcome in found)
        return found

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        connection, process = self.ranks[rank]
        try:
            if connection.poll(max(deadline - time.monotonic(), 0)):
                return Outcome(*pickle.loads(connection.recv_bytes()))
            return Outcome(error="not done in time")
        except (EOFError, ConnectionResetError):
            process.join(10)
            return Outcome(error=f"{DIED} {process.exitcode}: {self._said(rank)}")

    def _said(self, rank: int) -> str:
        """The end of what a rank wrote to stderr."""
        lines = Path(self.folder, f"stderr-{rank}").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(("USDT", "Extension modules")))[-3000:]

    def close(self) -> None:
        """End the ranks: those that are sound by themselves, together; all others at once."""
        for connection, process in self.ranks:
            if not self.sound:
                process.kill()
            connection.close()
        for _, process in self.ranks:
            process.join(60)
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[tuple[int, str], Pool] = {}


def run(function: Callable[..., Any], *args: Any, world: int = 2, backend: str = "gloo") -> list[Any]:
    """Call function(*args) on every rank of the pool. What each returned; an AssertionError where one raised."""
    key = world, backend
    pool = _pools.get(key) or _pools.setdefault(key, Pool(*key))
    try:
        return results(pool.call(function, *args))
    finally:
        if not pool.sound:
            _pools.pop(key).close()


def outcomes(function: Callable[..., Any], *args: Any, world: int = 2, patience: float = PATIENCE) -> list[Outcome]:
    """Call function(*args) on every rank of a new process group, which ends with it. What each did."""
    pool = Pool(world)
    try:
        return pool.call(function, *args, patience=patience)
    finally:
        pool.close()


def results(found: list[Outcome]) -> list[Any]:
    """What each rank returned, where none failed."""
    # One that died first: the others only lost their connection to it.
    failed = sorted((not one.error.startswith(DIED), rank) for rank, one in enumerate(found) if one.error)
    assert not failed, f"rank {failed[0][1]}: {found[failed[0][1]].error}"
    return [outcome.result for outcome in found]


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


@functools.cache
def _processes(backend: str) -> Any:
    if backend == "nccl":  # the server has asked for GPUs, as diffusers does at import: its forks cannot use them
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


# On a rank


def _serve(connection: Connection, rank: int, world: int, store: str, backend: str) -> None:
    """Call what comes until nothing does."""
    gc.freeze()  # what the server has loaded
    stderr = os.open(Path(store).parent / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(stderr, 2)
    faulthandler.enable()  # for where a rank was that is aborted
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    shared = dist.FileStore(store, world)
    dist.init_process_group(backend, store=shared, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        result, error = None, ""
        try:
            function, args = pickle.loads(message)
            with _as_before():
                result = function(*args)
        except BaseException:
            error = traceback.format_exc()
        connection.send_bytes(pickle.dumps((result, error)))  # copies tensors, where send would share their memory
    dist.destroy_process_group()


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    from tests.conftest import as_in_a_fresh_process

    torch.manual_seed(0)
    random.seed(0)
    try:
        with mock.patch.dict(os.environ), as_in_a_fresh_process():
            yield
    finally:
        torch._dynamo.reset()


def one_accelerator() -> Any:
    """diffusers asks how many devices of the machine's accelerator there are; a CPU is one."""
    return mock.patch.object(torch.accelerator, "device_count", return_value=1)
