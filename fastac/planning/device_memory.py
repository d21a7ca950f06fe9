"""Memory of a device, as its allocator counts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

UNCOUNTED = ("cpu", "meta")
"""Types of devices whose memory nobody counts."""


class DeviceMemory(NamedTuple):
    """Bytes of one device, for this process."""

    # In tensors that are alive now.
    allocated: int
    # The most that tensors could have: what they have, what the allocator keeps for later, and what is free.
    usable: int
    # The most that tensors had at one time. Only torch.accelerator.reset_peak_memory_stats lowers it.
    peak: int


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; None if nobody counts it."""
    # torch.accelerator.get_memory_info is newer than torch 2.9.
    module: Any = None if device.type in UNCOUNTED else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    usable = torch.accelerator.memory_reserved(device) + free
    if hasattr(module, "get_per_process_memory_fraction"):
        usable = min(usable, int(total * module.get_per_process_memory_fraction(device)))
    return DeviceMemory(
        torch.accelerator.memory_allocated(device), usable, torch.accelerator.max_memory_allocated(device)
    )
