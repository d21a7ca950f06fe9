"""Memory and time of a device: what its allocator and its events say."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastac.engine.process import process
from fastac.engine.torch_private import tree_leaves

UNCOUNTED = ("cpu", "meta")
"""Types of devices whose memory nobody counts."""


class DeviceMemory(NamedTuple):
    """Bytes of one device that this process uses."""

    # In tensors that are alive now.
    allocated: int
    # The most that tensors had at one time. Only torch.accelerator.reset_peak_memory_stats lowers it.
    peak: int


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; None if nobody counts it."""
    if device.type in UNCOUNTED or not hasattr(torch.get_device_module(device), "mem_get_info"):
        return None
    return DeviceMemory(torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device))


def usable_bytes(device: torch.device) -> int:
    """The most that tensors of this process could have: what the allocator has reserved, and what is free."""
    # torch.accelerator.get_memory_info is newer than torch 2.9.
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    usable = torch.accelerator.memory_reserved(device) + free
    if hasattr(module, "get_per_process_memory_fraction"):
        usable = min(usable, int(total * module.get_per_process_memory_fraction(device)))
    return int(usable)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that is sharded over several (DTensor)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def counted(model: torch.nn.Module) -> int:
    """Bytes of weights, gradients and states of optimizers, for a device that nobody counts."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    tensors += [leaf for optimizer in process.optimizers for leaf in tree_leaves([*optimizer.state.values()])]
    return sum(local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@functools.cache
def watch_optimizers() -> None:
    """Notice the first step of each optimizer: its states are allocated then. Cached, so that it is done once."""

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in process.optimizers:
            process.optimizers.add(optimizer)
            process.memory_changes += 1

    register_optimizer_step_post_hook(stepped)


def now(device: torch.device) -> Any:
    """This moment: an event of the device, or on a CPU the seconds of a clock."""
    if device.type in UNCOUNTED:
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds(began: Any, ended: Any) -> float:
    """The seconds between two moments. Waits for the device."""
    if isinstance(began, float):
        return max(float(ended) - began, 1e-9)
    ended.synchronize()
    return max(float(began.elapsed_time(ended)) / 1000, 1e-9)
