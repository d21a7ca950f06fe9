"""A model and its inputs without their data, and the simulation of a step of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from fastac import hook, models
from fastac.engine import flops, torch_private
from fastac.models import BlockContainer
from fastac.planning.known_values import KnownValues
from fastac.planning.simulation import Split, simulate
from fastac.planning.timeline import Timeline

BREAKS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)
"""What a model raises that does not run on some inputs, or without values."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is simulated: a model and the keyword arguments of one call, all of fake tensors.

    containers: of its blocks. by_forward: their forward is what is simulated, not what the model is given to call.
    known: the values of those inputs that say what the model does.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Any]
    containers: Sequence[BlockContainer]
    by_forward: bool
    known: KnownValues

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        """All blocks, by name."""
        return {name: block for container in self.containers for name, block in container.blocks.items()}

    def given(self, inputs: Mapping[str, Any]) -> Subject:
        """The same model with other inputs."""
        fakes = torch_private.tree_map(functools.partial(_fake_input, self.known), dict(inputs))
        return dataclasses.replace(self, inputs=fakes)


def subject(model: torch.nn.Module, inputs: Mapping[str, Any], blocks: Any = None) -> Subject:
    """A copy of a model and its inputs without their data. blocks: as in `enable`.

    Raises FastacError for a model without blocks that are known.
    """
    known = KnownValues(torch_private.fake_mode())
    fake = _faked(models.unwrapped(model), known)
    hook.disable(fake)  # what is enabled on the model is not what is simulated
    containers = hook.choose(fake, blocks, fake)
    for module in models.switches(fake):
        module.gradient_checkpointing = False
    return Subject(fake, {}, containers, models.is_by_forward(fake, blocks), known).given(inputs)


def _faked(model: torch.nn.Module, known: KnownValues) -> torch.nn.Module:
    """A deep copy of a model with fake tensors in the place of its own."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)
    ]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        fake = _fake(tensor.detach(), known)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


def _fake(tensor: torch.Tensor, known: KnownValues) -> torch.Tensor:
    """A tensor without data: on the device of one that has data, else on the CPU, where all operations are known."""
    if torch_private.is_fake(tensor) or tensor.device.type == "meta":
        with known.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return known.mode.from_tensor(tensor)  # type: ignore[no-any-return]


def _fake_input(known: KnownValues, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = _fake(value.detach(), known).requires_grad_(value.requires_grad)
    if value.device.type == "cpu" and not torch_private.is_fake(value):
        known.learn(fake, value.detach())
    return fake


def simulated(
    subject: Subject,
    checkpointed: Collection[str],
    split: Split = Split(),  # noqa: B008 it is frozen
) -> Timeline:
    """A step in which the blocks of these names are under full checkpointing."""
    flops.register_formulas()
    blocks = subject.blocks
    attach = functools.partial(_attach, subject)
    with subject.known.mode:
        return simulate(subject.model, subject.inputs, blocks, attach, checkpointed, subject.known, split)


def _attach(subject: Subject, function: Callable[..., Any]) -> None:
    """Make a model, which is nobody else's, call a function in the place of its blocks."""
    model: Any = subject.model
    if not subject.by_forward:
        model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
        return
    for block in subject.blocks.values():
        vars(block).pop("forward", None)
        vars(block)["forward"] = functools.partial(function, block.forward)
