"""Weights that are on the device for their turn alone: block swap, group offloading to disk.

The device is memory of the weights' own, seen by weak references. What is not on it is NaN.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

import fastac
from tests import support
from tests.live_bytes import LiveBytes
from tests.support import CPU_ATTENTION, Tensors, assert_same
from tests.ways.recipes import WAN, adapt, batches

CPU = torch.device("cpu")
BLOCKS, CALLS, TOKENS, HEADS, WIDTH = 4, 8, 128, 2, 24
ATTENTION, LINEAR = CALLS * TOKENS * (WIDTH + HEADS) * 4, BLOCKS * TOKENS * WIDTH * 4
SAVED = {"attn_only": ATTENTION, fastac.Policy("attn_only", linear=("ffn.net.2",)): ATTENTION + LINEAR}
"""Policy -> bytes of what it saves: outputs of attention with their logsumexps, and of one Linear of each block."""


class Device:
    """Bytes of the weights that are on it, by the order in which they came, and the most there were."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.brought = self.peak = 0

    @property
    def now(self) -> int:
        return sum(list(self.sizes.values()))

    def bring(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of a weight, on the device for as long as anybody holds its memory."""
        copy = weight.detach().clone()
        self.brought += 1
        self.sizes[self.brought] = copy.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(copy.untyped_storage(), self.sizes.pop, self.brought).atexit = False
        return copy


def away(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor(torch.nan).expand_as(weight)


class Result(NamedTuple):
    """Of two steps: outputs and gradients, attention kernels, bytes that the forward left alive.

    on_device: bytes of weights, after each forward and each backward. peak: the most of them.
    """

    tensors: Tensors
    executions: list[int]
    held: list[int]
    on_device: list[int]
    peak: int


Way = Callable[[Any, Device], object]


def trained(way: Way | None, policy: Any, trains: str, host: str) -> Result:
    """policy: "torch" for torch's own checkpointing, "none", or fastac's. host: diffusers, or the blocks' forward."""
    model, batch = support.build(WAN, num_layers=BLOCKS)
    model.requires_grad_(trains == "all")
    device = Device()
    if way is not None:
        way(model, device)
    torch.manual_seed(0)
    if trains == "adapter":
        adapt(model)
    if policy == "torch" and host == "blocks":
        for block in model.blocks:
            block.forward = functools.partial(torch_checkpoint, block.forward, use_reentrant=False)
    elif policy == "torch":
        model.enable_gradient_checkpointing()
    elif policy != "none":
        fastac.enable(model, policy, blocks="blocks" if host == "blocks" else None)
    support.count_cpu_attention()
    found = Result({}, [], [], [], 0)
    for step, one in enumerate(batches(batch, 2)):
        support.executions.clear()
        model.zero_grad()
        with LiveBytes() as meter:
            outputs = model(**one)
        found.held.append(meter.now)
        found.on_device.append(device.now)
        tensors = {"output": outputs[0].detach()}
        support.loss_of(outputs).backward()
        del outputs
        found.on_device.append(device.now)
        found.executions.append(support.executions[CPU_ATTENTION])
        tensors |= support.gradients(support.leaves_of(model, {}))
        found.tensors.update({f"step {step}: {name}": tensor for name, tensor in tensors.items()})
    return found._replace(peak=device.peak)


def assert_as_torch(way: Way, trains: str = "adapter", host: str = "diffusers") -> Result:
    """Attention once, the gradients of no swap, and no weight longer on the device than under torch's checkpointing."""
    fixed = trained(None, "none", trains, host)
    uncheckpointed, full = (trained(way, policy, trains, host) for policy in ("none", "torch"))
    assert (fixed.executions, full.executions) == ([CALLS] * 2, [2 * CALLS] * 2)
    assert_same(full.tensors, fixed.tensors)
    assert uncheckpointed.on_device[0] > full.on_device[0], "weights that autograd holds on the device are not seen"
    for policy, size in SAVED.items():
        found = trained(way, policy, trains, host)
        assert found.executions == [CALLS] * 2, found.executions
        assert_same(found.tensors, fixed.tensors)
        assert (found.on_device, found.peak) == (full.on_device, full.peak)
        assert [here - there for here, there in zip(found.held, full.held, strict=True)] == [size] * 2
    return found


class Swap:
    """Block swap as in musubi-tuner: the last blocks take turns with the first, one comes in where another goes out.

    A thread swaps the weights of Linear modules: in the forward after a block has run, in the backward when gradients
    leave one. A block waits for its own before its forward, and in the backward before its turn comes.
    """

    def __init__(self, blocks: Any, device: Device, thread: ThreadPoolExecutor, count: int = BLOCKS // 2) -> None:
        self.device, self.thread, self.count, self.last = device, thread, count, len(blocks) - 1
        self.weights = [[m.weight for m in block.modules() if isinstance(m, torch.nn.Linear)] for block in blocks]
        self.host = {weight: weight.data for weights in self.weights for weight in weights}
        self.moves: dict[int, Future[None]] = {}
        for index, block in enumerate(blocks):
            for weight in self.weights[index]:
                weight.data = device.bring(weight) if index < len(blocks) - count else away(weight)
            block.register_forward_pre_hook(lambda *_, index=index: self.wait(index))
            block.register_forward_hook(lambda *_, index=index: self.after_forward(index))
            if index:
                block.register_full_backward_hook(lambda *_, index=index: self.after_backward(index))

    def swap(self, out: int, into: int) -> None:
        for weight in self.weights[out]:
            self.host[weight] = weight.data.clone()
            weight.data.fill_(torch.nan)  # as another block's weights are written there
            weight.data = away(weight)
        for weight in self.weights[into]:
            weight.data = self.device.bring(self.host[weight])

    def wait(self, index: int) -> None:
        if index in self.moves:
            self.moves.pop(index).result(timeout=300)

    def after_forward(self, index: int) -> None:
        if index < self.count:
            into = self.last + 1 - self.count + index
            self.moves[into] = self.thread.submit(self.swap, index, into)

    def after_backward(self, index: int) -> None:
        into = self.count - (self.last - index)
        if 0 <= into < self.count:
            self.moves[into] = self.thread.submit(self.swap, index + 1, into)
        if index <= self.count:
            self.wait(index - 1)


def test_block_swap() -> None:
    """The memory that a weight leaves is free at once, in the forward and in the backward."""
    with ThreadPoolExecutor(1) as thread:
        found = assert_as_torch(lambda model, device: Swap(model.blocks, device, thread), host="blocks")
    (size,) = {*found.on_device, found.peak}
    model, _ = support.build(WAN, num_layers=BLOCKS // 2)
    assert size == sum(m.weight.nbytes for m in model.blocks.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.parametrize(
    ("level", "trains", "host", "early_stop"),
    [
        ("block", "all", "diffusers", True),
        ("block", "adapter", "blocks", True),
        ("block", "all", "blocks", False),
        ("leaf", "all", "diffusers", False),
    ],
)
def test_group_offloading_to_disk(
    level: str, trains: str, host: str, early_stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """early_stop: of the recompute, by an error; the hook that takes the block off the device again does not run then.

    Else none is left there, but torch itself then reads frozen weights of norms, which it keeps as parameters, as NaN.
    """
    devices: list[Device] = []
    # A copy is aligned as weights are; what comes from a file is not, and products with it are rounded otherwise.
    for own, moved in ((ModuleGroup.onload_, lambda one: devices[-1].bring(one)), (ModuleGroup.offload_, away)):

        def move(group: ModuleGroup, own: Any = own, moved: Any = moved) -> None:
            own(group)
            for weight in group.tensor_to_key:
                weight.data = moved(weight)

        monkeypatch.setattr(ModuleGroup, own.__name__, move)

    def way(model: Any, device: Device) -> None:
        devices.append(device)
        folder, groups = str(tmp_path / str(len(devices))), 1 if level == "block" else None
        model.enable_group_offload(CPU, CPU, f"{level}_level", groups, offload_to_disk_path=folder)

    with set_checkpoint_early_stop(early_stop):
        found = assert_as_torch(way, trains, host)
    assert bool(found.on_device[1]) == early_stop
