"""A model and its inputs without their data, for the simulation of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import torch_private
from fastac.engine.blocks import inside, set_state
from fastac.engine.checkpoint_wrappers import call_plainly, is_wrapper
from fastac.errors import FastacError
from fastac.hosts import blocks_given, detach_all
from fastac.models.blocks import choose_blocks
from fastac.models.switches import is_by_forward, switches_of
from fastac.planning.fake_values import KnownValues
from fastac.planning.fake_weights import fake, faked, runs_on

DEVICES = ("cuda", "cpu")
"""Types of devices for which there are plans."""

Inputs = Mapping[str, Any] | Sequence[Any]
"""Inputs of one call: keyword arguments, or a tuple of arguments by position."""


class Arguments(NamedTuple):
    """Inputs of one call, with arguments of both kinds."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        """Names and shapes of the tensors."""
        named = [*(("", value) for value in self.args), *self.kwargs.items()]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        return ", ".join(f"{name} {tuple(tensor.shape)}".strip() for name, tensor in tensors)


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """A model and the arguments of one call, all of fake tensors."""

    model: torch.nn.Module
    # Name -> block. A simulation adds other modules that the model checkpoints.
    blocks: dict[str, torch.nn.Module]
    # The blocks' forward is replaced, since the model does not call a checkpointing function.
    by_forward: bool
    # The values of inputs that decide what the model does.
    known: KnownValues
    # Where the fake tensors are.
    device: torch.device
    # The model will train on CUDA, but its fake tensors are on the CPU.
    as_on_cuda: bool
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_inputs(self, inputs: Inputs) -> FakeModel:
        """The same model with other inputs."""
        args, kwargs = torch_private.tree_map(partial(_fake_input, self), arguments(inputs))
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def attach(self, function: Callable[..., Any]) -> None:
        """Make the model call a function instead of each block, with the block (or its forward) and its inputs."""
        model: Any = self.model
        if not self.by_forward:
            model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
            return
        for block in self.blocks.values():
            # A forward from an earlier call goes first: `block.forward` is then the one of its class.
            vars(block).pop("forward", None)
            vars(block)["forward"] = partial(function, block.forward)


def arguments(inputs: Inputs) -> Arguments:
    """Arguments by position and by name. Raises FastacError for inputs that are neither a mapping nor a tuple."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Arguments(tuple(inputs), {})
    raise FastacError(
        f"plan(inputs=...): a mapping of argument names to values was expected, as in "
        f'{{"hidden_states": ..., "timestep": ...}}, or a tuple of arguments, got {type(inputs).__name__}'
    )


def fake_model(model: torch.nn.Module, inputs: Inputs, blocks: Any = None, device: str | None = None) -> FakeModel:
    """A copy of a model and its inputs without their data. blocks, device: as in `plan`.

    Raises FastacError if the blocks of the model are unknown, or the device is.
    """
    if device not in (None, *DEVICES):
        raise FastacError(f"plan(device={device!r}): there are {' and '.join(map(repr, DEVICES))}")
    known = KnownValues(torch_private.fake_mode())
    # The first floating input shows the dtype in which the model computes, and the device.
    like = max(tensors_of(inputs), key=torch.is_floating_point, default=torch.empty(0))
    trains_on = device or _device_of(runs_on(model), like.device.type)
    # Inputs on another device than the one that trains: the machine may not have that device, but it has a CPU.
    fake_device = like.device if like.device.type == trains_on else torch.device("cpu")
    copied = faked(model, known, torch.empty(0, dtype=like.dtype, device=fake_device))
    blocks = blocks_given(copied, blocks)
    detach_all(copied)  # what is enabled on the model is not simulated
    named = choose_blocks(copied, blocks, copied)
    for switch in switches_of(copied):
        switch.module.gradient_checkpointing = False
    module: Any
    for module in copied.modules():
        set_state(module, None)  # states differ, so blocks with states would never be alike
        if is_wrapper(module) and inside(module) in named.values():
            module.checkpoint_fn = call_plainly  # fastac takes its place
    as_on_cuda = trains_on == "cuda" and fake_device.type != "cuda"
    without_inputs = FakeModel(copied, named, is_by_forward(copied, blocks), known, fake_device, as_on_cuda)
    return without_inputs.with_inputs(inputs)


def _device_of(weights: set[str], inputs: str) -> str:
    """The type of the device that will train. Weights that wait on a CPU are brought to their inputs."""
    accelerators = ({inputs} | weights) - {"cpu", "meta"}
    return accelerators.pop() if accelerators else "cpu" if "cpu" in weights else "cuda"


def _fake_input(fake_model: FakeModel, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    device = fake_model.device if fake_model.device.type == "cpu" else value.device
    faked_value = fake(value, fake_model.known, device).requires_grad_(value.requires_grad)
    if value.device.type != "meta" and not torch_private.is_fake(value):
        fake_model.known.learn(faked_value, value.detach())
    return faked_value
