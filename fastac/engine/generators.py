"""Random number generators: their states, and those that a region may draw from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

_CPU = torch.device("cpu")

States = Sequence[tuple[torch.device, torch.Tensor]]
"""Generators, by device, with their states."""


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that kernels on a device draw from, as bytes."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_states(states: States) -> None:
    """Restore generators to earlier states."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def generators_preserved(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that restores the generators of the CPU and of these devices when it ends."""
    before = [(device, generator_state(device)) for device in {_CPU, *devices}]
    try:
        yield
    finally:
        set_states(before)


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among some values, also those in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def devices_of(args: Iterable[object]) -> set[torch.device]:
    """Devices on which a kernel may draw random numbers: those of its tensors, and the CPU, where seeds are drawn."""
    return {_CPU, *(tensor.device for tensor in tensors_in(args))}


def current_states(args: Iterable[object]) -> States:
    """States of the generators that a region may draw from.

    These are the CPU's and, once the accelerator is in use, those of its current device and of the arguments' devices.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if accelerator is None or not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return [(_CPU, torch.get_rng_state())]
    current = torch.device(accelerator.type, torch.accelerator.current_device_index())
    devices = {device for device in devices_of(args) if device.type == current.type} | {_CPU, current}
    return [(device, generator_state(device)) for device in devices]
