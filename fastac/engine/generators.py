"""Random number generators of a region, and what else a run that is discarded leaves as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

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


@contextlib.contextmanager
def generators_preserved(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the generators of the CPU and of these devices as they are now."""
    before = [(device, generator_state(device)) for device in {torch.device("cpu"), *devices}]
    try:
        yield
    finally:
        for device, state in before:
            set_generator_state(state, device)


@contextlib.contextmanager
def buffers_preserved(module: torch.nn.Module | None) -> Iterator[None]:
    """Leave a module's buffers as they are now: the tensors themselves, and what is in them."""
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in (module.modules() if module is not None else ())
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            if getattr(owner, name) is not buffer:
                setattr(owner, name, buffer)
            if not torch.equal(buffer, value):  # writing would count as an in-place change
                buffer.detach().copy_(value)
