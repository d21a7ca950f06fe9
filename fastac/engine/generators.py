"""Random number generators of a region, and what else a run that is discarded leaves as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

_CASTING = [device for device in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(device)]
"""Types of device that autocast can be on for."""


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


@functools.cache
def is_of_torch(op: Any) -> bool:
    """Whether an op is one of torch's own, higher-order ones among them."""
    return not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prim", "prims")


def autocast_as_called(op: Any) -> contextlib.AbstractContextManager[Any]:
    """For a dispatch mode that runs an op: autocast for its kernel as it was on where the op was called.

    Under a mode torch leaves autocast out, also for kernels in Python that would run under it without the mode. Ops of
    torch's own never do: their inputs were cast before.
    """
    if is_of_torch(op):
        return contextlib.nullcontext()
    with enable_reentrant_dispatch():
        devices = [device for device in _CASTING if torch.is_autocast_enabled(device)]
    stack = contextlib.ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device))  # in the dtype that is set
    return stack
