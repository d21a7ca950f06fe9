"""Offload on a CUDA device: exact, less memory, copies that overlap with kernels, no waiting.

Guards of the same are tested on a CPU: tests/engine/test_offload.py.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import hidden_seconds
from fastac import Policy
from fastac.cli.measuring import allocated_bytes
from tests import support
from tests.engine.test_offload import Leading
from tests.support import AttentionBlock, assert_same

# cuBLAS reads it before the first product of a process, and without it refuses to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = pytest.mark.gpu

LAYERS = 12

WARM = 6
"""Steps before those that are looked at, which compare no values: 0, 1, 2 and 4 do, 8 is the next."""

TOKENS, TEXT, WIDTH = 8192, 128, 1024
LONG = 3 * 8192
"""Tokens of a block whose kernels take longer than the host takes to launch them."""
# A copy is hidden only while a kernel runs, so a block's kernels must take longer than their launch. They did not
# with 8,192 tokens on an H100: 9.2 of 19.0 ms of copies were hidden under attn_only.
# - Kernels of a forward: .27 TFLOP of attention at 380 TFLOP/s, .17 of products at 550, passes over memory: 1.3 ms.
# - Its 57 ops on the host: 32 us each (as 135 ops of a Wan block there, 4.3 ms), .5 ms more for a region: 2.3 ms.
# - Copies: 3 x 16.8 MB (an input, two attention outputs) at 53 GB/s: .95 ms each way, half of it beside no kernel.
#   They begin where they should: out when the region after the next begins, back one recompute ahead.
# Attention grows with the square of the tokens, copies linearly, the host's time not at all. With 24,576 tokens:
# 8 ms of kernels in a forward and 32 ms in a recompute with its backward, 2.3 ms on the host, 2.9 ms of copies.


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


def inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(1, size, WIDTH, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for name, size in {"video": tokens, "text": TEXT}.items()
    }


def warm_step(policy: Any, tokens: int = TOKENS, trains: bool = True) -> Callable[[], None]:
    """A step of a model, after some. trains: the weights, whose gradients would be most of the peak."""
    model, given = blocks(policy).requires_grad_(trains), inputs(tokens)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**given).float().square().mean().backward()

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()  # else a step takes host memory while copies of the one before it are under way
    return step


POLICIES = pytest.mark.parametrize("policy", [Policy("full", offload=True), Policy("attn_only", offload=True)], ids=str)


@POLICIES
def test_a_step(policy: Policy) -> None:
    expected = support.train_step(blocks("none"), inputs())
    model = blocks(policy)
    for _ in range(4):
        assert_same(support.train_step(model, inputs()), expected)


@POLICIES
def test_memory(policy: Policy) -> None:
    """Two blocks stay, two more are on their way to the host, and one is on its way back. The host takes no more."""
    peaks = [allocated_bytes(warm_step(one, trains=False), device="cuda").peak for one in (Policy(policy.name), policy)]
    assert peaks[0] - peaks[1] > 4 * TOKENS * WIDTH * 2
    step, allocations = warm_step(policy), []
    for _ in range(WARM):
        step()
        torch.cuda.synchronize()
        allocations.append(int(torch.cuda.host_memory_stats()["num_host_alloc"]))
    assert len(set(allocations)) == 1
    assert allocations[-1] >= LAYERS - 2


@POLICIES
def test_nothing_waits(policy: Policy) -> None:
    """The host never waits for the device in a warm step, and most copies overlap with kernels."""
    step = warm_step(policy, LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = seen.events() or []
    copies = [event for event in events if re.match(r"Memcpy (DtoH|HtoD) .*Pinned", event.name)]
    assert {event.name.split()[1] for event in copies} == {"DtoH", "HtoD"}
    assert hidden_seconds(events) > 0.5 * sum(event.time_range.elapsed_us() for event in copies) / 1e6
