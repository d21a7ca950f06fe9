"""Offload on a CUDA device: exact, less memory, copies that overlap with kernels, no waiting.

The same on a CPU, in small, where the simulated device of tests/engine/simulated.py takes the copies.
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
from fastac.verification.measuring import allocated_bytes
from tests import support
from tests.engine.simulated import Simulated, simulated
from tests.engine.test_offload import Leading
from tests.live_bytes import peak_of
from tests.support import AttentionBlock, assert_same

# cuBLAS reads it before the first product of a process, and without it refuses to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LAYERS = 12

WARM = 6
"""Steps before those that are looked at, which compare no values: 0, 1, 2 and 4 do, 8 is the next."""

Step = Callable[[], None]


class Cuda:
    """long: tokens of a block whose kernels take longer than the host takes to launch them."""

    name = "cuda"
    tokens, text, width, heads = 8192, 128, 1024, 8
    # A copy is hidden only while a kernel runs, so a block's kernels must take longer than their launch. They did not
    # with 8,192 tokens on an H100: 9.2 of 19.0 ms of copies were hidden under attn_only.
    # - Kernels of a forward: .27 TFLOP of attention at 380 TFLOP/s, .17 of products at 550, passes over memory: 1.3 ms.
    # - Its 57 ops on the host: 32 us each (as 135 ops of a Wan block there, 4.3 ms), .5 ms more for a region: 2.3 ms.
    # - Copies: 3 x 16.8 MB (an input, two attention outputs) at 53 GB/s: .95 ms each way, half of it beside no kernel.
    #   They begin where they should: out when the region after the next begins, back one recompute ahead.
    # Attention grows with the square of the tokens, copies linearly, the host's time not at all. With 24,576 tokens:
    # 8 ms of kernels in a forward and 32 ms in a recompute with its backward, 2.3 ms on the host, 2.9 ms of copies.
    long = 3 * 8192

    def peak(self, run: Step, model: torch.nn.Module) -> int:
        return allocated_bytes(run, device="cuda").peak

    def host_allocations(self) -> int:
        torch.cuda.synchronize()  # else a step takes memory while copies of the one before it are under way
        return int(torch.cuda.host_memory_stats()["num_host_alloc"])

    def waits(self, run: Step) -> int:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return 0

    def hidden(self, run: Step) -> float:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        events = seen.events() or []
        copies = [event for event in events if re.match(r"Memcpy (DtoH|HtoD) .*Pinned", event.name)]
        assert {event.name.split()[1] for event in copies} == {"DtoH", "HtoD"}
        return hidden_seconds(events) / (sum(event.time_range.elapsed_us() for event in copies) / 1e6)


class Cpu:
    """The simulated device, whose copies last until something waits for them."""

    name = "cpu"
    tokens, text, width, heads = 24, 6, 16, 2
    long = tokens

    def __init__(self, device: Simulated) -> None:
        self.device = device

    def peak(self, run: Step, model: torch.nn.Module) -> int:
        return peak_of(run, outside=model.parameters())

    def host_allocations(self) -> int:
        return self.device.allocated

    def waits(self, run: Step) -> int:
        """How many numbers are read, for which a host has to wait: thousands in a step that compares values."""
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        return sum(event.name == "aten::_local_scalar_dense" for event in seen.events() or [])

    def hidden(self, run: Step) -> float:
        """Which part of the copies was not waited for before another product was computed."""
        self.device.lasted.clear()
        with support.counting("aten::mm", "aten::addmm") as products:
            self.device.clock = products.total
            run()
        return sum(map(bool, self.device.lasted)) / len(self.device.lasted)


Device = Cuda | Cpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda":
        yield Cuda()
    else:
        with simulated() as found:
            yield Cpu(found)
            assert not found.faults


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flash attention adds up gradients in any order otherwise."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch.use_deterministic_algorithms(False)


def blocks(policy: Any, device: Device) -> Any:
    block = functools.partial(AttentionBlock, device.width, heads=device.heads)
    return Leading(policy, LAYERS, block).to(device.name, torch.bfloat16)


def inputs(device: Device, tokens: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"video": tokens or device.tokens, "text": device.text}
    return {
        name: torch.randn(1, size, device.width, generator=generator).to(device.name, torch.bfloat16).requires_grad_()
        for name, size in sizes.items()
    }


def step(model: Any, given: dict[str, torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    model(**given).float().square().mean().backward()


POLICIES = [Policy("full", offload=True), Policy("attn_only", offload=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_step(policy: Policy, device: Device) -> None:
    expected = support.train_step(blocks("none", device), inputs(device))
    model = blocks(policy, device)
    for _ in range(4):
        assert_same(support.train_step(model, inputs(device)), expected)


def peak(policy: Any, device: Device) -> int:
    """Of a warm step, above what there was before it."""
    model, given = blocks(policy, device).requires_grad_(False), inputs(device)  # gradients would be most of it
    for _ in range(WARM):
        step(model, given)
    return device.peak(lambda: step(model, given), model)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_memory_of_the_device(policy: Policy, device: Device) -> None:
    """Two blocks stay, two more are on their way to the host, and one is on its way back."""
    bytes_of_an_input = device.tokens * device.width * 2
    assert peak(Policy(policy.name), device) - peak(policy, device) > 4 * bytes_of_an_input


def test_memory_of_the_host_does_not_grow(device: Device) -> None:
    model, given = blocks(POLICIES[1], device), inputs(device)
    allocations = []
    for _ in range(2 * WARM):
        step(model, given)
        allocations.append(device.host_allocations())
    assert len(set(allocations[WARM:])) == 1
    assert allocations[-1] >= LAYERS - 2


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nothing_waits(policy: Policy, device: Device) -> None:
    """The host never waits for the device in a warm step, and most copies overlap with kernels."""
    model, given = blocks(policy, device), inputs(device, device.long)
    for _ in range(WARM):
        step(model, given)
    assert device.waits(lambda: step(model, given)) == 0
    assert device.hidden(lambda: step(model, given)) > 0.5
