"""What the forward of a region begins with, and each of its recomputes again.

A recompute is exact if it computes from the same state as the forward: arguments, random generators, autocast, default
device, and the buffers and training modes of the modules. A `Beginning` takes all of it before the forward, and
restores it for as many recomputes as backward asks for. What comes after is as if there had been no recompute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastac.engine import module_state, torch_private
from fastac.engine.blocks import BlockState
from fastac.engine.offload import Stash, unpack_input, unpack_keywords
from fastac.engine.process import process

_NOTHING = contextlib.nullcontext()
_SDPA = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "mem_efficient", "MATH": "math"}
"""Backends of scaled_dot_product_attention, with their names in torch.backends.cuda."""

Inputs = tuple[list[Any], dict[str, Any], Mapping[int, torch.Tensor]]
"""Positional and keyword arguments, and the buffers of which recompute writes copies: `id` of the copy -> buffer."""


class Beginning:
    """The state in which one call of a function begins.

    Args:
        function: is called as function(*args, **kwargs).
        args: saved as autograd saves tensors, so that in-place changes are noticed.
        kwargs: of these the versions are compared. `offload` puts what a stash takes in the place of tensors.
        modules: the block, or the modules that the function may run.
        state: what is known of the block.
        draws: recompute draws the random numbers that the forward drew.
        looks: values are compared: look for whatever else the function reads and writes.
        mode: makes a context for recompute: a dispatch mode, if the forward runs under one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        modules: Sequence[torch.nn.Module],
        state: BlockState,
        *,
        draws: bool = True,
        looks: bool = False,
        mode: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.function, self.kwargs, self.modules, self.state, self.mode = function, kwargs, modules, state, mode
        self.saved_args = torch_private.save(args)
        self.is_offloaded = False
        self.versions = _versions(args, kwargs)
        self.generators = current_states((*args, *kwargs.values())) if draws else []
        # The states of Python's and numpy's generators take long to read. They are read in steps that compare values,
        # and in every step of a block that drew from them in one of these.
        self.python = python_states() if draws and (looks or state.draws) else b""
        self.snapshot = module_state.begin(modules, looks)
        self.autocast = autocast_state()
        self.default_device = torch_private.default_device()
        # What follows is for messages: the user's contexts, which recompute does not enter again.
        self.settings = self.settings_now = settings() if looks else {}
        self.user_hooks = torch_private.user_hooks() if looks else None

    def end_forward(self) -> None:
        """The forward has ended: keep what it changed, and drop what it left alone."""
        if self.python and not self.state.draws:
            self.state.draws = self.python != python_states()
            self.python = self.python if self.state.draws else b""
        if self.snapshot is not None:
            self.snapshot.end_forward(self.function, self.modules)
        # Inputs that the function writes itself, such as a cache, are written by recompute as well.
        self.versions = [(tensor, version) for tensor, version in self.versions if not _was_written(tensor, version)]

    @property
    def has_written_inputs(self) -> bool:
        """Whether an input that autograd does not guard was written since the forward."""
        return any(itertools.starmap(_was_written, self.versions))

    def offload(self, args: Iterable[Any], stash: Stash) -> None:
        """Hand the inputs to a stash, which may move them to the host. args: the arguments of the forward."""
        torch_private.register_hooks(self.saved_args, args, stash.take_input, unpack_input)
        self.kwargs = {name: stash.take_input(value) for name, value in self.kwargs.items()}
        self.is_offloaded = True

    @contextlib.contextmanager
    def restored(self) -> Iterator[Inputs]:
        """A context in which the function begins with the same state again. Afterwards all is as it was."""
        with _NOTHING if self.snapshot is None else self.snapshot.restored() as buffers:
            kwargs = unpack_keywords(self.kwargs) if self.is_offloaded else self.kwargs
            inputs = torch_private.unpack(self.saved_args), kwargs, buffers or {}
            # Before the block runs, which may open contexts of its own.
            self.settings_now = settings() if self.settings else {}
            before = [(device, generator_state(device)) for device, _ in self.generators]
            python = python_states() if self.python else b""
            try:
                set_states(self.generators)
                if self.python:
                    set_python_states(self.python)
                with self._contexts():
                    yield inputs
            finally:
                set_states(before)
                if python:
                    set_python_states(python)

    def _contexts(self) -> AbstractContextManager[Any]:
        """The forward's autocast and default device, and its mode."""
        device = self.default_device
        # Most recomputes find the forward's state, and to enter contexts takes time in every one of them.
        if self.autocast == autocast_state() and device == torch_private.default_device() and self.mode is None:
            return _NOTHING
        stack = contextlib.ExitStack()
        # Backward may run under another autocast than the forward, so it is first switched off for every device.
        for device_type in _autocast_device_types():
            stack.enter_context(torch.amp.autocast(device_type, enabled=False))
        for device_type, dtype, caches in self.autocast:
            stack.enter_context(torch.amp.autocast(device_type, dtype, cache_enabled=caches))
        if device is not None:
            stack.enter_context(device)
        if self.mode is not None:
            stack.enter_context(self.mode())
        return stack


def _versions(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[tuple[weakref.ref[torch.Tensor], int]]:
    """The tensors given by keyword or inside containers, with their versions. autograd guards the positional ones."""
    values = [value for value in args if not isinstance(value, torch.Tensor)]
    values += kwargs.values()
    # Inference tensors have no version: to read it raises.
    return [(weakref.ref(tensor), tensor._version) for tensor in tensors_in(values) if not tensor.is_inference()]


def _was_written(reference: weakref.ref[torch.Tensor], version: int) -> bool:
    tensor = reference()  # None if somebody replaced it, or if it is on the host
    return tensor is not None and tensor._version != version


def settings() -> dict[str, str]:
    """What contexts around a model set, and recompute does not: how a sentence on it begins, and the value."""
    allowed = [name for name, word in _SDPA.items() if getattr(torch.backends.cuda, f"{word}_sdp_enabled")()]
    return {
        "The stance of torch.compiler was": f'"{torch_private.stance()}"',
        "torch.nn.attention.sdpa_kernel allowed": ", ".join(allowed),
        **{name: read() for name, read in process.settings.items()},
    }


def autocast_state() -> list[tuple[str, torch.dtype, bool]]:
    """The device types for which autocast is on; its dtype, and whether it caches."""
    return [
        (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
        for device_type in _autocast_device_types()
        if torch.is_autocast_enabled(device_type)
    ]


@functools.cache
def _autocast_device_types() -> list[str]:
    """The CPU and the accelerator, if autocast knows them."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device_type for device_type in device_types if torch.amp.is_autocast_available(device_type)]


# Random number generators

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
    used = _accelerator_in_use()
    devices = [torch.device(used, index) for index in range(torch.accelerator.device_count() if used else 0)]
    states = [(device, generator_state(device)) for device in (_CPU, *devices)]
    states_of_python = python_states()
    try:
        yield
    finally:
        set_states(states)
        set_python_states(states_of_python)


def _accelerator_in_use() -> str:
    """The type of the accelerator; "" before it is in use: to read a state of its generators would initialize it."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    # torch.mps has no is_initialized.
    is_used = accelerator is not None and getattr(module, "is_initialized", torch.accelerator.is_available)()
    return accelerator.type if accelerator is not None and is_used else ""


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
    if not (used := _accelerator_in_use()):
        return [(_CPU, torch.get_rng_state())]
    # Only devices that the region uses: restoring another one would undo what other threads draw there, and reading a
    # state copies it from the device.
    devices = {device for device in devices_of(args) if device.type == used}
    current = torch.device(used, torch.accelerator.current_device_index())
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
