"""A model and its inputs without their data, and the simulation of a step of it, of all its blocks or of a few."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fastac import hook, models
from fastac.engine import flops, torch_private
from fastac.errors import FastacError, class_name
from fastac.models import BlockContainer
from fastac.planning.known_values import KnownValues
from fastac.planning.simulation import Simulation, Split, simulate
from fastac.planning.timeline import ENDS, BlockList, Timeline, ends_of, middles_are_alike, repeated

logger = logging.getLogger("fastac")

BREAKS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)
"""What a model raises that cannot run with some of its blocks left out."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is simulated: a model and the keyword arguments of one call, all of fake tensors.

    containers: of its blocks. known: the values of those inputs that say what the model does.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Any]
    containers: Sequence[BlockContainer]
    known: KnownValues

    def given(self, inputs: Mapping[str, Any]) -> Subject:
        """The same model with other inputs."""
        fakes = torch_private.tree_map(functools.partial(_fake_input, self.known), dict(inputs))
        other = dataclasses.replace(self, inputs=fakes)
        if "lists" in vars(self):  # a matter of the model
            vars(other)["lists"] = self.lists
        return other

    @functools.cached_property
    def lists(self) -> list[BlockList]:
        """The blocks, and those of them that stand for the others of their list: all, where these are not alike.

        How a block differs may show in its parameters, or in a forward alone: a model may treat blocks by their places.
        """
        lists = [_ends(self.model, container) for container in self.containers]
        if all(one.is_whole for one in lists):
            return lists
        whole = [BlockList(one.names, one.names) for one in lists]
        if not all(_have_equal_parameters(self.containers, one) for one in lists):
            return whole
        forward = _step(self, whole, False, Split(), backward=False)
        return lists if middles_are_alike(forward, lists) else whole


def subject(model: torch.nn.Module, inputs: Mapping[str, Any], blocks: Any = None) -> Subject:
    """A copy of a model and its inputs without their data. blocks: as in `enable`.

    Raises FastacError for a model without blocks that are known.
    """
    known = KnownValues(torch_private.fake_mode())
    fake = _faked(models.unwrapped(model), known)
    hook.disable(fake)  # what is enabled on the model is not what is simulated
    if blocks is None:
        containers = models.containers(fake, models.row_of(fake))
    else:
        containers = models.select(fake, blocks, fake)
    if not containers:
        raise FastacError(f"plan: found no transformer blocks in {class_name(model)}. Name them: blocks=...")
    return Subject(fake, {}, containers, known).given(inputs)


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


def simulated(subject: Subject, checkpoints: bool, split: Split = Split()) -> Timeline:  # noqa: B008 it is frozen
    """A step without any checkpointing, or one under full checkpointing.

    Of long lists a few blocks are simulated, where that gives the same.
    """
    flops.register_formulas()
    lists = subject.lists
    if not all(one.is_whole for one in lists):
        try:
            found = repeated(_step(subject, lists, checkpoints, split), lists)
        except BREAKS as error:
            logger.debug("%s does not run without its middle blocks: %s", class_name(subject.model), error)
        else:
            if found is not None:
                return found
    logger.debug("%s: every block is simulated", class_name(subject.model))
    lists = [BlockList(one.names, one.names) for one in lists]
    found = repeated(_step(subject, lists, checkpoints, split), lists)
    assert found is not None
    return found


def _ends(model: torch.nn.Module, container: BlockContainer) -> BlockList:
    names = tuple(container.blocks)
    is_list = isinstance(model.get_submodule(container.name), (torch.nn.ModuleList, torch.nn.Sequential))
    return BlockList(names, ends_of(names) if is_list else names)


def _have_equal_parameters(containers: Sequence[BlockContainer], one: BlockList) -> bool:
    """Whether those of the blocks that are left out are like those of the one that stands for them."""
    blocks = {name: block for container in containers for name, block in container.blocks.items()}

    def parameters(name: str) -> list[object]:
        return [(inner, p.shape, p.dtype, p.requires_grad) for inner, p in blocks[name].named_parameters()]

    return all(parameters(name) == parameters(one.simulated[ENDS - 1]) for name in one.left_out)


def _step(
    subject: Subject, lists: Sequence[BlockList], checkpoints: bool, split: Split, backward: bool = True
) -> Simulation:
    blocks = {
        name: container.blocks[name]
        for container, one in zip(subject.containers, lists, strict=True)
        for name in one.simulated
    }
    attach = functools.partial(_attach, subject.model, blocks)
    with subject.known.mode, _shortened(subject, lists):
        return simulate(subject.model, subject.inputs, blocks, attach, checkpoints, subject.known, split, backward)


@contextmanager
def _shortened(subject: Subject, lists: Sequence[BlockList]) -> Iterator[None]:
    """A model with only those of its blocks in it that are simulated."""
    before = []
    for container, one in zip(subject.containers, lists, strict=True):
        if not one.is_whole:
            module = subject.model.get_submodule(container.name)
            before.append((module, module._modules))
            module._modules = {str(i): container.blocks[name] for i, name in enumerate(one.simulated)}
    try:
        yield
    finally:
        for module, modules in before:
            module._modules = modules


def _attach(model: Any, blocks: Mapping[str, torch.nn.Module], function: Callable[..., Any]) -> None:
    """Make a model, which is nobody else's, call a function in the place of its blocks."""
    if models.has_switch(model) and hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
        return
    for block in blocks.values():
        vars(block).pop("forward", None)
        vars(block)["forward"] = functools.partial(function, block.forward)
