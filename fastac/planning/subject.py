"""A model and its inputs without their data, and the simulation of a step of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from fastac import hook, models
from fastac.engine import flops, torch_private
from fastac.engine.torch_private import tree_leaves
from fastac.models import BlockContainer
from fastac.planning.known_values import KnownValues
from fastac.planning.simulation import Split, simulate
from fastac.planning.timeline import Timeline
from fastac.planning.weights import fake, faked

Inputs = Mapping[str, Any] | Sequence[Any]
"""Of one call: keyword arguments, or those by position."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is simulated: a model and the arguments of one call, all of fake tensors.

    containers: of its blocks. by_forward: their forward is what is simulated, not what the model is given to call.
    known: the values of those inputs that say what the model does.
    """

    model: torch.nn.Module
    inputs: Inputs
    containers: Sequence[BlockContainer]
    by_forward: bool
    known: KnownValues

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        """All blocks, by name."""
        return {name: block for container in self.containers for name, block in container.blocks.items()}

    def given(self, inputs: Inputs) -> Subject:
        """The same model with other inputs."""
        plain = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
        fakes = torch_private.tree_map(functools.partial(_fake_input, self.known), plain)
        return dataclasses.replace(self, inputs=fakes)


def subject(model: torch.nn.Module, inputs: Inputs, blocks: Any = None) -> Subject:
    """A copy of a model and its inputs without their data. blocks: as in `enable`.

    Raises FastacError for a model without blocks that are known, or that cannot be copied.
    """
    known = KnownValues(torch_private.fake_mode())
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    like = max(tensors, key=torch.is_floating_point, default=torch.empty(0))
    copied = faked(models.unwrapped(model), known, like)
    blocks = hook.blocks_given(copied, blocks)
    hook.disable(copied)  # what is enabled on the model is not what is simulated
    containers = hook.choose(copied, blocks, copied)
    for module in models.switches(copied):
        module.gradient_checkpointing = False
    return Subject(copied, {}, containers, models.is_by_forward(copied, blocks), known).given(inputs)


def _fake_input(known: KnownValues, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    found = fake(value, known, value.device).requires_grad_(value.requires_grad)
    if value.device.type == "cpu" and not torch_private.is_fake(value):
        known.learn(found, value.detach())
    return found


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
