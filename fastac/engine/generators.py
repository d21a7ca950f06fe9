"""Random number generators: their states, and those that a region may draw from."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

_CPU = torch.device("cpu")

States = Sequence[tuple[torch.device, torch.Tensor]]
"""Pairs of a device and the state of its generator."""


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


def python_states() -> bytes:
    """The states of Python's generator and, once it is loaded, of numpy's: to be compared, and to be set."""
    # As bytes, because numpy's state holds an array, and == of arrays is not one truth value. numpy is not imported for
    # this: if the program has not loaded it, nobody has drawn from it.
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.get_state(legacy=False)))


def set_python_states(states: bytes) -> None:
    """Restore Python's generator and numpy's to earlier states."""
    python_state, numpy_state = pickle.loads(states)
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy.random"].set_state(numpy_state)


@contextlib.contextmanager
def generators_preserved() -> Iterator[None]:
    """A context, or decorator, that restores the user's generators at the end: torch's, Python's and numpy's.

    torch's generators are those of the CPU and, once the accelerator is in use, of all of its devices.
    """
    states = [(device, generator_state(device)) for device in [_CPU, *_accelerators()]]
    states_of_python = python_states()
    try:
        yield
    finally:
        set_states(states)
        set_python_states(states_of_python)


def _accelerators() -> list[torch.device]:
    """Devices of the accelerator; none before it is in use, since reading a state would initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    # torch.mps has no is_initialized.
    if accelerator is None or not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def tensors_in(values: Iterable[object], depth: int = 8) -> Iterator[torch.Tensor]:
    """The tensors among some values, also those in lists, tuples, mappings and dataclasses, down to some depth."""
    for value in values if depth else ():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value, depth - 1)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values(), depth - 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            yield from tensors_in((getattr(value, field.name, None) for field in fields), depth - 1)


def devices_of(args: Iterable[object]) -> set[torch.device]:
    """Devices on which a kernel may draw random numbers: its tensors' devices, and the CPU, where seeds are drawn."""
    return {_CPU, *(tensor.device for tensor in tensors_in(args))}


def current_states(args: Iterable[object]) -> States:
    """States of the generators that a region may draw from.

    These are the CPU's and, once the accelerator is in use, those of the arguments' devices. If no argument is on the
    accelerator, it is the generator of the current device.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if accelerator is None or not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return [(_CPU, torch.get_rng_state())]
    # Only devices that the region uses: restoring another one would undo what other threads draw there, and reading a
    # state copies it from the device.
    devices = {device for device in devices_of(args) if device.type == accelerator.type}
    current = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return [(device, generator_state(device)) for device in (_CPU, *(devices or {current}))]


class Draws:
    """Sees whether a region draws random numbers outside of saved calls. args: the region's arguments."""

    def __init__(self, args: Iterable[object]) -> None:
        self.states, self.of_python = current_states(args), python_states()
        self.seen = False

    def look(self) -> bool:
        """Whether the region has drawn so far."""
        moved = any(not torch.equal(state, generator_state(device)) for device, state in self.states)
        self.seen = self.seen or moved or self.of_python != python_states()
        return self.seen

    def skip(self) -> None:
        """A saved call has ended: its kernel does not run again, so what it drew does not count."""
        self.states = [(device, generator_state(device)) for device, _ in self.states]
        self.of_python = python_states()
