"""States of torch's default random number generators, per device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def state(device: torch.device) -> torch.Tensor:
    """The state of the generator that kernels on a device draw from, as bytes."""
    if device.type == "cpu":
        return torch.get_rng_state()
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def set_state(saved: torch.Tensor, device: torch.device) -> None:
    """Put the generator of a device into a state that `state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(saved)
    else:
        torch.get_device_module(device).set_rng_state(saved, device)


@contextlib.contextmanager
def forked(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the generators of the CPU and of these devices as they are now."""
    before = [(device, state(device)) for device in {torch.device("cpu"), *devices}]
    try:
        yield
    finally:
        for device, saved in before:
            set_state(saved, device)
