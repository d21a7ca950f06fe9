"""Real flash-attn 2 and 3 on a Hopper GPU, where they are installed: one forward kernel per call, equal gradients.

On a CPU their real Python layers run over kernels of tests/backends/flash_on_cpu.py, each library in its own process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastac import Policy
from tests import support
from tests.backends import flash_on_cpu, groups, packages
from tests.distributed import ranks
from tests.engine.simulated import simulated
from tests.support import AttentionBlock, AttentionStack, assert_same, stack, train_step

MODULES = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}

CASES = [
    ("flash_attn_2", "function", 64),
    ("flash_attn_2", "function", 128),
    ("flash_attn_2", "varlen", 128),
    ("flash_attn_2", "dropout", 64),
    ("flash_attn_3", "function", 128),
    ("flash_attn_3", "varlen", 128),
]
"""Library, way to call it, dim of a head."""

FORWARD = re.compile(r"flash_fwd(_splitkv)?_kernel|FlashAttnFwdSm\d+")
"""In the names of CUDA kernels of an attention forward, and in none that prepares or combines something for it."""

LAYERS, HEADS, BATCH = 3, 2, 2
TOKENS = {"cpu": (24, 6), "cuda": (8192, 256)}
"""Of video and text. On a GPU, so many that offload moves what a block keeps."""

POLICIES = [("none", 1), ("full", 2), ("attn_only", 1), (Policy("attn_only", offload=True), 1)]
"""And how often each call's kernel runs."""


def attention(library: Any, way: str) -> Callable[..., torch.Tensor]:
    @functools.cache
    def ends(tokens: int, device: torch.device) -> torch.Tensor:
        return torch.tensor([0, tokens * 3 // 2, tokens * 2], dtype=torch.int32, device=device)

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.transpose(1, 2) for one in heads)
        if way != "varlen":
            dropout: dict[str, Any] = {"dropout_p": 0.1} if way == "dropout" else {}
            output = library.flash_attn_func(query, key, value, **dropout, deterministic=True)
            output = output[0] if isinstance(output, tuple) else output  # with statistics, in some builds of 3
        else:  # two sequences of unequal length, one after the other
            lengths = query.shape[1], key.shape[1]
            places = [ends(length, query.device) for length in lengths] + [length * 3 // 2 for length in lengths]
            packed = [one.flatten(0, 1) for one in (query, key, value)]
            output = library.flash_attn_varlen_func(*packed, *places, deterministic=True)
            output = (output[0] if isinstance(output, tuple) else output).unflatten(0, (BATCH, -1))
        return output.transpose(1, 2)

    return attend


def forward_kernels(run: Callable[[], object], device: str) -> int:
    """How many kernels of an attention forward ran."""
    if device == "cpu":
        support.executions.clear()
        run()
        return support.executions.total()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(FORWARD.search(event.name) is not None for event in events)


def assert_parity(library: str, way: str, dim: int, device: str) -> None:
    """Outputs and gradients of no checkpointing, bit for bit. Dropout in the blocks follows that in the kernel."""
    if device == "cpu":
        packages.use(library)
        getattr(flash_on_cpu, library)()
    attend, width = attention(importlib.import_module(MODULES[library]), way), HEADS * dim
    generator = torch.Generator().manual_seed(1)
    given = {
        name: torch.randn(BATCH, tokens, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for name, tokens in zip(("video", "text"), TOKENS[device], strict=True)
    }

    def build(policy: str | Policy) -> AttentionStack:
        block = functools.partial(AttentionBlock, width, HEADS, dropout=0.1, attend=attend)
        return stack(layers=LAYERS, dtype=torch.bfloat16, policy=policy, block=block).to(device)

    expected = train_step(build("none"), given)
    for policy, times in POLICIES:
        # What flash-attn 2 returns without bytes stays where it is, as everything small does.
        with simulated(smallest=1) if device == "cpu" else contextlib.nullcontext():
            model = build(policy)
            assert_same(train_step(model, given), expected)
            executed = forward_kernels(lambda model=model: assert_same(train_step(model, given), expected), device)
            assert executed == times * 2 * LAYERS, policy
            if isinstance(policy, Policy):
                assert model.blocks[0]._fastac_state.transfers.host_bytes > 0


@pytest.fixture(scope="module")
def process_of() -> Iterator[Callable[[str], ranks.Pool]]:
    """A process for a library. In this one diffusers and other tests would find a package without its CUDA part."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def process(library: str) -> ranks.Pool:
            pool = ranks.Pool(world=1)
            stack.callback(pool.close)
            return pool

        yield process


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("library", "way", "dim"), CASES)
def test_parity(library: str, way: str, dim: int, device: str, process_of: Callable[[str], ranks.Pool]) -> None:
    if device == "cuda":
        pytest.importorskip(MODULES[library], reason=f"not covered: no {library} here", exc_type=ImportError)
        assert_parity(library, way, dim, device)
    elif absent := groups.not_here([library], groups.REQUIRED):
        pytest.skip("\n".join(absent))
    else:
        ranks.results(process_of(library).call(assert_parity, library, way, dim, device))
