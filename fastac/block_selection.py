"""Which modules of a model `enable(model, blocks=...)` names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fastac.checkpoint_wrappers import inside, plain_name
from fastac.errors import FastacError
from fastac.models import LISTS, BlockContainer
from fastac.policy import is_inside
from fastac.ranks import class_name


def select(
    model: torch.nn.Module, blocks: str | torch.nn.Module | Iterable[Any], outer: torch.nn.Module
) -> list[BlockContainer]:
    """The blocks that `enable(model, blocks=...)` was given, by the containers they are in.

    blocks: the dotted name of a module list, sequence or dict, whose members are the blocks, or of one block; a module
    of the model instead of a name; several of these. outer: what the model is wrapped in, whose names do as well.
    Raises FastacError for what is no part of the model, for no blocks at all, for a block inside another, and for one
    whose forward can not be replaced.
    """
    several = [blocks] if isinstance(blocks, (str, torch.nn.Module)) or not isinstance(blocks, Iterable) else blocks
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, torch.nn.Module] = {}
    for one in several:
        module = _by_name(one, model, outer) if isinstance(one, str) else one
        if not isinstance(module, torch.nn.Module) or module not in names:
            raise FastacError(
                f"enable(blocks=...): {type(one).__name__} {_short(one)} is no module of {class_name(model)}. "
                f'Give the dotted name of a module list, such as "transformer.layers", or modules of the model.'
            )
        for block in module.children() if _is_container(module) else (module,):
            name = plain_name(names[block])
            found[name] = inside(block)
            _check_forward(name, found[name])
    if not found:
        raise FastacError(f"enable(blocks={_short(blocks)}): there is no block in it")
    for name in found:
        around = [other for other in found if name != other and is_inside(name, other)]
        if around:
            raise FastacError(f"enable(blocks=...): block {name!r} is inside block {around[0]!r}. Name one of them.")
    return grouped(found)


def _is_container(module: torch.nn.Module) -> bool:
    """Whether a module does nothing but hold others; not one of a class with a forward of its own."""
    plain = (torch.nn.Module.forward, torch.nn.Sequential.forward)
    return isinstance(module, LISTS) and type(module).forward in plain


def _check_forward(name: str, block: torch.nn.Module) -> None:
    forward = inspect.getattr_static(type(block), "forward", None)
    own = "forward" in vars(block)  # such as a compiled module's
    if isinstance(block, torch.jit.ScriptModule) or (
        not own and isinstance(forward, (property, staticmethod, classmethod))
    ):
        kind = "TorchScript" if isinstance(block, torch.jit.ScriptModule) else f"a {type(forward).__name__}"
        raise FastacError(
            f"enable(blocks=...): the forward of {name!r} ({class_name(block)}) is {kind}, which can not be "
            f"replaced. Call fastac.checkpoint(block, *args) where the model calls it."
        )


def without_wrappers(containers: Iterable[BlockContainer]) -> list[BlockContainer]:
    """The same containers, with what is inside torch's activation wrappers in the place of these."""
    return [
        BlockContainer(container.name, {name: inside(block) for name, block in container.blocks.items()})
        for container in containers
    ]


def grouped(blocks: Mapping[str, torch.nn.Module]) -> list[BlockContainer]:
    """Blocks by qualified name, in one container for each module that holds some."""
    containers: dict[str, BlockContainer] = {}
    for name, block in blocks.items():
        parent = container_of(name)
        containers.setdefault(parent, BlockContainer(parent, {})).blocks[name] = block
    return list(containers.values())


def container_of(name: str) -> str:
    """Name of the module that holds a block; the block's own for one that stands alone in its model."""
    return name.rpartition(".")[0] or name


def _short(value: object) -> str:
    text = "" if isinstance(value, torch.nn.Module) else repr(value)
    return text if len(text) < 80 else text[:80] + "..."


def _by_name(name: str, model: torch.nn.Module, outer: torch.nn.Module) -> torch.nn.Module:
    for holder in (model, outer):
        try:
            return holder.get_submodule(name)
        except AttributeError:
            pass
    lists = [n for n, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    known = f"Its module lists are {', '.join(map(repr, lists[:8]))}." if lists else "It has no module list."
    raise FastacError(f"enable(blocks={name!r}): {class_name(model)} has no such module. {known}")
