"""Random number generators of a region."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that kernels on a device draw from, as bytes."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Put the generator of a device into a state that `generator_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def devices_of(args: Iterable[object]) -> set[torch.device]:
    """Devices on which a kernel may draw random numbers: those of its tensors, and the CPU, where seeds are drawn."""
    found = {torch.device("cpu")}
    for value in args:
        if isinstance(value, torch.Tensor):
            found.add(value.device)
        elif isinstance(value, (list, tuple)):
            found |= devices_of(value)
    return found
