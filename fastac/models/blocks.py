"""Find the transformer blocks of a model, and the model inside a training script's wrappers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastac.engine.blocks import inside, is_inside
from fastac.engine.checkpoint_wrappers import plain_name
from fastac.errors import FastacError, class_name, did_you_mean
from fastac.models.catalogue import row_of
from fastac.models.row import ModelRow
from fastac.models.switches import is_by_forward

logger = logging.getLogger("fastac")

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""Containers of blocks."""
# The forwards of containers that do nothing but hold their members, or call them in turn.
_NO_FORWARD = (torch.nn.Module.forward, torch.nn.Sequential.forward)


@dataclasses.dataclass(frozen=True)
class BlockContainer:
    """A list of blocks inside a model."""

    name: str
    """The qualified name of the list."""
    blocks: dict[str, torch.nn.Module]
    """The blocks, by qualified name."""

    @property
    def block_class(self) -> str:
        """The class name of the blocks; several names are joined by "|"."""
        return "|".join(dict.fromkeys(class_name(block) for block in self.blocks.values()))


def containers(model: torch.nn.Module, row: ModelRow | None = None) -> list[BlockContainer]:
    """The block containers that the model's row names; without a row, the outermost lists whose members hold attention.

    They name blocks in policies, reports and plans. A model that calls a checkpointing function chooses itself which
    blocks it checkpoints.
    """
    lists = _lists(model)
    names = set(row.containers) if row is not None else _outermost(lists, _says_attention)
    return [container for name, container in lists.items() if name in names]


def possible_containers(model: torch.nn.Module) -> list[BlockContainer]:
    """The outermost lists that may hold blocks: members have "attention" in a name, or are several with parts.

    A block that calls an attention function itself, as Flux's single blocks do, may have no part of that name.
    """

    def is_possible(container: BlockContainer) -> bool:
        parts = [[list(part.parameters()) for part in block.children()] for block in container.blocks.values()]
        return _says_attention(container) or (len(parts) > 1 and all(map(any, parts)))

    lists = _lists(model)
    names = _outermost(lists, is_possible)
    return [container for name, container in lists.items() if name in names]


def _lists(model: torch.nn.Module) -> dict[str, BlockContainer]:
    return {
        name: BlockContainer(
            name, {f"{name}.{key}": block for key, block in module._modules.items() if block is not None}
        )
        for name, module in model.named_modules()
        # A dict of lists only groups lists of blocks, which are found by themselves.
        if isinstance(module, LISTS) and not _is_dict_of_lists(module)
    }


def _outermost(lists: Mapping[str, BlockContainer], are_blocks: Callable[[BlockContainer], bool]) -> set[str]:
    names = {name for name, container in lists.items() if container.blocks and are_blocks(container)}
    # A block may hold lists of attention itself. The list around it is the list of blocks.
    return {name for name in names if not name.startswith(tuple(outer + "." for outer in names))}


def _is_dict_of_lists(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleDict) and any(isinstance(inner, LISTS) for inner in module.values())


def _says_attention(container: BlockContainer) -> bool:
    def says(block: torch.nn.Module) -> bool:
        names = (f"{name} {class_name(inner)}".lower() for name, inner in block.named_modules())
        return any("attention" in name or "attn" in name for name in names)

    # All members, because a list with one that has no attention is a list of stages: the blocks are deeper.
    return all(map(says, container.blocks.values()))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, FullyShardedDataParallel, torch.compile's OptimizedModule, PeftModel.

    These may be nested in any order, also inside another wrapper that holds a diffusers model as `module` (DeepSpeed's
    engine). A model without a wrapper is returned unchanged.
    """
    while (inner := _inner(model)) is not None and inner is not model:
        model = inner
    return model


def check_module(model: object, call: str) -> torch.nn.Module:
    """The model inside its wrappers. Raises FastacError if it is not a module. call: the public function's name."""
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"{call}: expected a model, got {type(model).__name__}. With a pipeline, pass its transformer: "
            f"{call}(pipe.transformer)."
        )
    return unwrapped(model)


def _inner(model: torch.nn.Module) -> torch.nn.Module | None:
    children = model._modules
    # Wrappers are known by the names of their children, so that peft and FSDP need not be imported.
    if "_orig_mod" in children:
        return children["_orig_mod"]
    if hasattr(type(model), "get_base_model") and "base_model" in children:  # peft
        return model.get_base_model()  # type: ignore[operator, no-any-return]
    if "_fsdp_wrapped_module" in children:
        return children["_fsdp_wrapped_module"]
    inner = children.get("module")
    # A child called `module` is not enough, since any model may have one: the wrapper is one of torch's, or the child
    # is a diffusers model.
    data_parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, data_parallel) or hasattr(type(inner), "enable_gradient_checkpointing"):
        return inner
    return None


def choose_blocks(model: torch.nn.Module, blocks: Any, outer: torch.nn.Module) -> list[BlockContainer]:
    """The containers of a model's blocks, as `enable` takes `blocks`. Raises FastacError for an ambiguous model.

    outer: the wrapper around the model, or the model itself.
    """
    if blocks is not None:
        return select(model, blocks, outer)
    # A model with a checkpointing function chooses its blocks itself, so here names are all that is needed.
    named = containers_inside(model)
    if named and not is_by_forward(model, blocks):
        return named
    possible = possible_containers(model)
    # If no part has attention in its name, blocks of one class may still call attention functions themselves. They are
    # taken: the first region shows whether they do, and a list that holds no attention is an error then.
    taken = named or [found for found in possible if len(set(map(type, found.blocks.values()))) == 1]
    # Several lists are an error: the blocks of a list that was not taken would train without checkpointing.
    if len(taken) != 1 or len(possible) != 1:
        some = f"{len(possible)} module lists whose members may be its blocks" if taken else "no list of attention"
        raise FastacError(f"{class_name(model)} has {some}. {name_blocks(model, possible)}")
    logger.info("%s: took the blocks in %r, the only list of them", class_name(model), taken[0].name)
    return select(model, taken[0].name, outer)


def select(
    model: torch.nn.Module, blocks: str | torch.nn.Module | Iterable[Any], outer: torch.nn.Module
) -> list[BlockContainer]:
    """The blocks that `enable(model, blocks=...)` names, grouped by container.

    Args:
        outer: the wrapper around the model; its names are accepted too.

    Raises:
        FastacError: no blocks, a module outside the model, or nested blocks.
    """
    several = [blocks] if isinstance(blocks, (str, torch.nn.Module)) or not isinstance(blocks, Iterable) else blocks
    names = {module: name for name, module in model.named_modules()}
    selected: dict[str, torch.nn.Module] = {}
    for given in several:
        module = _by_name(given, model, outer) if isinstance(given, str) else given
        if not isinstance(module, torch.nn.Module) or module not in names:
            raise FastacError(
                f"enable(blocks=...): {type(given).__name__} is not a module of {class_name(model)}. Give the dotted "
                f'name of a module list, such as "transformer.layers", or modules of the model.'
            )
        # A list with a forward of its own is called as a whole, so it is a block itself.
        is_list = isinstance(module, LISTS) and type(module).forward in _NO_FORWARD
        for block in module.children() if is_list else (module,):
            # Blocks have the names that they have without torch's activation wrappers, so that policies fit both.
            selected[plain_name(names[block])] = inside(block)
    if not selected:
        raise FastacError("enable(blocks=...): there is no block in it")
    for name in selected:
        around = [other for other in selected if name != other and is_inside(name, other)]
        if around:
            raise FastacError(f"enable(blocks=...): block {name!r} is inside block {around[0]!r}. Name one of them.")
    return grouped(selected)


def containers_inside(model: torch.nn.Module) -> list[BlockContainer]:
    """The block containers of a model, with the blocks inside torch's activation wrappers."""
    return [
        BlockContainer(container.name, {name: inside(block) for name, block in container.blocks.items()})
        for container in containers(model, row_of(model))
    ]


def grouped(blocks: Mapping[str, torch.nn.Module]) -> list[BlockContainer]:
    """Group blocks by the module that holds them; a block at the root is its own container."""
    containers: dict[str, BlockContainer] = {}
    for name, block in blocks.items():
        parent = name.rpartition(".")[0] or name
        containers.setdefault(parent, BlockContainer(parent, {})).blocks[name] = block
    return list(containers.values())


def _by_name(name: str, model: torch.nn.Module, outer: torch.nn.Module) -> torch.nn.Module:
    for holder in (model, outer):
        try:
            return holder.get_submodule(name)
        except AttributeError:
            pass
    meant = did_you_mean(name, [known for known, _ in model.named_modules()])
    raise FastacError(f"enable(blocks={name!r}): {class_name(model)} has no such module.{meant} {module_lists(model)}")


def module_lists(model: torch.nn.Module) -> str:
    """A sentence that names the module lists of a model."""
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    return (
        f"Its module lists are {', '.join(map(repr, lists[:8]))}." if lists else "It has no module list: give modules."
    )


def name_blocks(model: torch.nn.Module, containers: Iterable[BlockContainer]) -> str:
    """A sentence that says how to pass `blocks=`: the containers, or if there are none, the module lists."""
    names = [f'"{container.name}"' for container in containers]
    written = (f"[{', '.join(names)}]" if len(names) > 1 else names[0]) if names else '"..."'
    return f"Name them, as in fastac.enable(model, blocks={written}).{'' if names else f' {module_lists(model)}'}"
