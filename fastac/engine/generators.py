"""Random number generators: their states, and those that a region's recompute begins with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

States = list[tuple[torch.device, torch.Tensor]]
"""Generators, by device, with their states."""


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
        elif isinstance(value, dict):
            found |= devices_of(value.values())
    return found


def is_initialized(accelerator: torch.device | None) -> bool:
    """Whether an accelerator is in use in this process, so that its generators may be read. None: there is none."""
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    return bool(module.is_initialized() if hasattr(module, "is_initialized") else torch.accelerator.is_available())


def current_states(args: Iterable[object]) -> States:
    """The generators that a region may draw from, with their states.

    Those of the CPU and, once the accelerator is in use, of its current device and of the devices of the arguments.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not is_initialized(accelerator):
        return [(_CPU, torch.get_rng_state())]
    current = torch.device(accelerator.type, torch.accelerator.current_device_index())
    devices = {device for device in devices_of(args) if device.type == current.type} | {_CPU, current}
    return [(device, generator_state(device)) for device in devices]


_CPU = torch.device("cpu")
