"""Which modules of a model are its transformer blocks, and which model a training script has wrapped."""

from __future__ import annotations

import dataclasses

import torch

from fastac.errors import class_name
from fastac.models.row import ModelRow

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""What blocks stand in."""


@dataclasses.dataclass(frozen=True)
class BlockContainer:
    """A list of blocks inside a model. blocks: qualified name -> module."""

    name: str
    blocks: dict[str, torch.nn.Module]

    @property
    def block_class(self) -> str:
        """Class name of the blocks; several are joined by "|"."""
        return "|".join(dict.fromkeys(class_name(block) for block in self.blocks.values()))


def containers(model: torch.nn.Module, row: ModelRow | None = None) -> list[BlockContainer]:
    """The block containers of a model: those of its row; without a row, the outermost lists that hold only attention.

    Which blocks are checkpointed is the model's own choice: it calls the checkpointing function. The containers say
    what these blocks are called, in policies for some of them, in reports and in plans.
    """
    lists = {
        name: BlockContainer(
            name, {f"{name}.{key}": block for key, block in module._modules.items() if block is not None}
        )
        for name, module in model.named_modules()
        if isinstance(module, LISTS) and not _is_dict_of_lists(module)
    }
    names = set(row.containers) if row is not None else _outermost_with_attention(lists)
    return [found for name, found in lists.items() if name in names]


def _outermost_with_attention(lists: dict[str, BlockContainer]) -> set[str]:
    names = {name for name, found in lists.items() if found.blocks and all(map(_has_attention, found.blocks.values()))}
    return {name for name in names if not name.startswith(tuple(outer + "." for outer in names))}


def _is_dict_of_lists(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleDict) and any(isinstance(inner, LISTS) for inner in module.values())


def _has_attention(block: torch.nn.Module) -> bool:
    return any(hasattr(inner, "processor") or "attention" in class_name(inner).lower() for inner in block.modules())


def has_switch(module: torch.nn.Module) -> bool:
    """Whether a module has the flag by which gradient checkpointing is switched on."""
    name = "gradient_checkpointing"  # not hasattr(module, name): a PeftModel passes on what its inner model has
    return name in vars(module) or hasattr(type(module), name)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, FullyShardedDataParallel, torch.compile's OptimizedModule, PeftModel.

    In any order and number, and inside any other wrapper that holds a diffusers model as `module` (an engine of
    DeepSpeed). A model that is not wrapped is returned itself.
    """
    while (inner := _inner(model)) is not None and inner is not model:
        model = inner
    return model


def _inner(model: torch.nn.Module) -> torch.nn.Module | None:
    children = model._modules
    if "_orig_mod" in children:
        return children["_orig_mod"]
    if hasattr(type(model), "get_base_model") and "base_model" in children:  # peft
        return model.get_base_model()  # type: ignore[operator, no-any-return]
    if "_fsdp_wrapped_module" in children:
        return children["_fsdp_wrapped_module"]
    inner = children.get("module")
    data_parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, data_parallel) or hasattr(type(inner), "enable_gradient_checkpointing"):
        return inner
    return None
