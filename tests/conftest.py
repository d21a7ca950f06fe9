"""Fixtures for every test. What they share beyond fixtures is in tests/support.py."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook

from fastac import backends, registry
from fastac.diagnosis.every_step import ran_again
from fastac.engine import releases
from fastac.engine.process import process
from tests import support


def pytest_configure() -> None:
    # Tiny tensors: more threads only wait for each other, and the order of a sum must not depend on the machine.
    torch.set_num_threads(1)
    gc.set_threshold(10_000, 20, 20)  # traces make many objects and few cycles


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, files without such a test are not imported: a machine with a GPU may lack what they need."""
    is_other = (
        config.option.markexpr == "gpu" and collection_path.is_file() and GPU not in collection_path.read_text("utf-8")
    )
    return True if is_other else None  # None: other plugins decide


GPU = "mark.gpu"

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests, also those that `-m` leaves out."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = list(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="not run on a GPU: no CUDA device here"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "ROWS", registry.rows())  # no warning of rows of other tests, whose ops are gone
    monkeypatch.setenv("COLUMNS", "200")  # nothing in tables is folded, whatever the tests run in
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    freeze_imported()
    with as_in_a_fresh_process():
        yield


_imported = 0
_unfreeze = gc.unfreeze


def freeze_imported() -> None:
    """Collections of garbage skip what was imported, a million objects: hundreds of tests collect several times."""
    global _imported
    if len(sys.modules) > _imported:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


def unfreeze() -> None:
    """As `bench` does, which ends with nothing frozen: the next test freezes again."""
    global _imported
    _imported = 0
    _unfreeze()


@contextmanager
def as_in_a_fresh_process() -> Iterator[None]:
    """What one test made known does not change the next, and no test may leave anything open behind."""
    process.reset()
    process.host_bytes = 0
    before = sys.modules.get("diffusers.models.attention_dispatch")
    backend = before._AttentionBackendRegistry._active_backend if before is not None else None
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        # Where the test was the first to import it, what it began with.
        first = dispatch.AttentionBackendName(dispatch.DIFFUSERS_ATTN_BACKEND)
        dispatch._AttentionBackendRegistry._active_backend = first if before is None else backend
    forget_accelerate()
    if not releases.is_at_least("2.13") and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        gc.collect()  # closes what torch's own checkpoint left open around a forward that raised
    left = ["scope"] if process.thread.scope else []
    left += ["listeners"] if set(process.listeners) - {ran_again} else []
    left += ["counts of what was answered"] if process.replayed_calls else []
    left += ["hook on dynamo's guards"] if set_guard_complete_hook(None) is not None else []
    left += ["dispatch modes"] if torch._C._len_torch_dispatch_stack() else []
    process.reset()
    assert not left, f"left open by the test: {', '.join(left)}"


def forget_accelerate() -> None:
    """It keeps one state per process."""
    if "accelerate.state" in sys.modules:
        accelerate = sys.modules["accelerate.state"]
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


@pytest.fixture
def rows_as_before() -> Iterator[None]:
    """The rows that a test registers, or takes away, are so for itself alone."""
    before = list(registry.state.rows)
    yield
    registry.state.rows[:] = before
    registry.state.reset()
    process.modules = None  # as many rows as before, and others: look for their ops again


@pytest.fixture
def functions_as_before() -> Iterator[None]:
    """The autograd.Functions that a test makes known are so for itself alone."""
    known, settled = list(process.known_functions), set(process.settled_functions)
    yield
    process.known_functions[:] = known
    process.settled_functions.clear()
    process.settled_functions.update(settled)


@pytest.fixture
def counted() -> Counter[str]:
    """How often the kernels of the tests' own ran since the test began or called `.clear()`."""
    support.executions.clear()
    return support.executions


@pytest.fixture
def attention_executions() -> Counter[str]:
    """How often attention kernels ran since the test began or called `.clear()`, by qualified op name.

    Counted by the kernels themselves, independently of fastac. torch's own is `support.CPU_ATTENTION`.
    """
    support.count_cpu_attention()
    support.executions.clear()
    return support.executions
