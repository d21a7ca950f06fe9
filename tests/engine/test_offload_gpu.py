"""Offload on a CUDA device: exact, less memory, copies that overlap with kernels, no waiting."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import hidden_seconds, is_copy
from fastac import Policy
from tests import support
from tests.engine.test_offload import Leading
from tests.support import AttentionBlock, assert_same

pytestmark = pytest.mark.gpu

# cuBLAS reads it before the first product of a process, and without it refuses to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LAYERS, TOKENS, WIDTH = 12, 8192, 1024
INPUT = TOKENS * WIDTH * 2
"""Bytes of the input of a block, in bf16."""

WARM = 6
"""Steps after which one compares no values, and reads none that were compared: 0, 1, 2 and 4 do, 8 is the next."""


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flash attention adds up gradients in any order otherwise."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch.use_deterministic_algorithms(False)


def blocks(policy: Any) -> Any:
    return Leading(policy, LAYERS, functools.partial(AttentionBlock, WIDTH, heads=8)).to("cuda", torch.bfloat16)


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"video": TOKENS, "text": 128}
    return {
        name: torch.randn(1, size, WIDTH, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for name, size in sizes.items()
    }


def step(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    model(**given).float().square().mean().backward()


POLICIES = [Policy("full", offload=True), Policy("attn_only", offload=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_step(policy: Policy) -> None:
    expected = support.train_step(blocks("none"), inputs())
    model = blocks(policy)
    for _ in range(4):
        assert_same(support.train_step(model, inputs()), expected)


def peak(policy: Any) -> int:
    """Of a warm step, above what there was before it."""
    model, given = blocks(policy).requires_grad_(False), inputs()  # gradients would be most of it
    for _ in range(WARM):
        step(model, given)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, given)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_memory_of_the_device(policy: Policy) -> None:
    """Two blocks stay, two more are on their way to the host, and one is on its way back."""
    assert peak(Policy(policy.name)) - peak(policy) > 4 * INPUT


def test_memory_of_the_host_does_not_grow() -> None:
    model, given = blocks(POLICIES[1]), inputs()
    allocations = []
    for _ in range(20):
        step(model, given)
        torch.cuda.synchronize()  # else a step takes memory while copies of the one before it are under way
        allocations.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert len(set(allocations[WARM:])) == 1
    assert allocations[-1] >= LAYERS - 2


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nothing_waits(policy: Policy) -> None:
    """The host never waits for the device in a warm step, and most copies overlap with kernels."""
    model, given = blocks(policy), inputs()
    for _ in range(WARM):
        step(model, given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(model, given)
        torch.cuda.synchronize()
    events = seen.events() or []
    copies = [event for event in events if is_copy(event.name)]
    assert {event.name.split()[1] for event in copies} == {"DtoH", "HtoD"}
    assert hidden_seconds(events) > 0.5 * sum(event.time_range.elapsed_us() for event in copies) / 1e6
