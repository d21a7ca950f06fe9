"""Fixtures for every test. What they share beyond fixtures is in tests/support.py."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook

from fastac import census, compiled_graphs, interception, opaque, registry, scopes
from tests import support


def pytest_configure() -> None:
    # Tiny tensors: more threads only wait for each other, and the order of a sum must not depend on the machine.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="not run on a GPU: no CUDA device here"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with as_in_a_fresh_process():
        yield


@contextmanager
def as_in_a_fresh_process() -> Iterator[None]:
    """What one test made known does not change the next, and no test may leave anything open behind."""
    census._blocks.clear()
    census._kinds.clear()
    before = sys.modules.get("diffusers.models.attention_dispatch")
    backend = before._AttentionBackendRegistry._active_backend if before is not None else None
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        # Where the test was the first to import it, what it began with.
        first = dispatch.AttentionBackendName(dispatch.DIFFUSERS_ATTN_BACKEND)
        dispatch._AttentionBackendRegistry._active_backend = first if before is None else backend
    if compiled_graphs._ran_again in interception.watchers:  # stays for good once something was compiled
        interception.watchers.remove(compiled_graphs._ran_again)
    compiled_graphs._traced.clear()
    compiled_graphs._watched.clear()
    left = [name for name, open_ in (("scope", scopes.thread.scope), ("watchers", interception.watchers)) if open_]
    left += ["execution counters"] if scopes.execution_counters else []
    left += ["hook on dynamo's guards"] if set_guard_complete_hook(None) is not None else []
    left += ["dispatch modes"] if torch._C._len_torch_dispatch_stack() else []
    scopes.thread.scope = None
    interception.watchers.clear()
    scopes.execution_counters.clear()
    assert not left, f"left open by the test: {', '.join(left)}"


@pytest.fixture
def rows_as_before() -> Iterator[None]:
    """The rows that a test registers, or takes away, are so for itself alone."""
    before = list(registry._rows)
    yield
    registry._rows[:] = before
    registry._decisions.clear()


@pytest.fixture
def functions_as_before() -> Iterator[None]:
    """The autograd.Functions that a test makes known are so for itself alone."""
    known, settled = list(opaque._known), set(opaque._settled)
    yield
    opaque._known[:] = known
    opaque._settled.clear()
    opaque._settled.update(settled)


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


@pytest.fixture
def uninformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOT's partitioner, as long as fastac has told it nothing."""
    import torch._functorch.partitioners
    from torch.utils.flop_counter import flop_registry

    known = torch._functorch.partitioners.get_default_op_list
    monkeypatch.setattr(torch._functorch.partitioners, "get_default_op_list", getattr(known, "__wrapped__", known))
    for op in [op for op, formula in flop_registry.items() if formula.__module__.startswith("fastac")]:
        monkeypatch.delitem(flop_registry, op)
