"""Reads which modules of a model are its transformer blocks: from its catalogue row, or from its structure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastac.models.loops import LISTS, checkpointed_lists
from fastac.models.videos import Video
from fastac.errors import class_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model class of diffusers, in one way to use it.

    variant: tells the rows of one class apart, such as text to video from image to video; the first row of a class is
    the one that stands for it. containers: dotted names of the module lists whose members the model checkpoints one by
    one. config: keyword arguments of a tiny model, with random weights, for `fastac check` and tests. inputs: makes
    its keyword arguments for one call, from the standard normal distribution.
    linear: classes of the modules in its blocks that are linear attention, and have no processor that says so.
    flex: its self-attention is flex_attention, whatever backend is set, which has no backward on the CPU.
    video_inputs: makes the keyword arguments of one call from a whole configuration, such as `model.config`, and a
    video, as the pipeline of diffusers calls the model. default_video: the video that this pipeline makes when asked
    for nothing else, with the compression of its VAE. Both or none of them.
    """

    class_name: str
    variant: str = ""
    containers: tuple[str, ...]
    config: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    linear: tuple[str, ...] = ()
    flex: bool = False
    video_inputs: Callable[[Mapping[str, Any], Video], dict[str, Any]] | None = None
    default_video: Callable[[Mapping[str, Any]], Video] | None = None

    @property
    def name(self) -> str:
        """What `fastac check` calls it: the class, and behind a colon the variant where there is one."""
        return f"{self.class_name}:{self.variant}" if self.variant else self.class_name


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
    """The block containers of a model: the module lists whose members it checkpoints one by one.

    Without a row: those of the loops in the model's code. Where these can not be read, the outermost lists whose
    members all hold attention.
    """
    lists = {
        name: BlockContainer(
            name, {f"{name}.{key}": block for key, block in module._modules.items() if block is not None}
        )
        for name, module in model.named_modules()
        if isinstance(module, LISTS) and not _is_dict_of_lists(module)
    }
    names = set(row.containers) if row is not None else _looped(model) or _outermost_with_attention(lists)
    return [found for name, found in lists.items() if name in names]


def _is_dict_of_lists(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleDict) and any(isinstance(inner, LISTS) for inner in module.values())


def _looped(model: torch.nn.Module) -> set[str] | None:
    found: set[str] = set()
    for name, module in model.named_modules():
        if has_switch(module):
            lists = checkpointed_lists(module)
            if lists is None:
                return None
            found.update(f"{name}.{inner}" if name else inner for inner in lists)
    return found


def _outermost_with_attention(lists: dict[str, BlockContainer]) -> set[str]:
    names = {name for name, found in lists.items() if found.blocks and all(map(_has_attention, found.blocks.values()))}
    return {name for name in names if not name.startswith(tuple(outer + "." for outer in names))}


def has_switch(module: torch.nn.Module) -> bool:
    """Whether a module has the flag by which gradient checkpointing is switched on."""
    name = "gradient_checkpointing"  # not hasattr(module, name): a PeftModel passes on what its inner model has
    return name in vars(module) or hasattr(type(module), name)


def _has_attention(block: torch.nn.Module) -> bool:
    return any(hasattr(inner, "processor") or "attention" in class_name(inner).lower() for inner in block.modules())


def is_available(row: ModelRow) -> bool:
    """Whether the diffusers that is installed has the class of a row."""
    import diffusers

    return hasattr(diffusers, row.class_name)


TIMES = re.compile("timestep|guidance")
PLACES = re.compile("mask|ind(ic|ex)es|position|rotary|camera")
"""Arguments whose names have one of these words tell how features are to be read, and are none themselves."""


def tiny_model(
    row: ModelRow, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of a row with random weights, in training mode, and its keyword arguments for one call.

    Parameters that begin as zeros get small values, since every gradient behind them would be zero. What the class
    keeps in float32 stays so. Floating inputs, alone or in lists, tuples and dicts, are features, which get the dtype
    and require grad, but for those of arguments that TIMES names, which get the dtype alone, and of those that PLACES
    names, which stay as they are: a mask that requires grad would decompose attention.
    """
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = getattr(diffusers, row.class_name)(**row.config).train()
        fill_zeros(model)
        inputs = row.inputs()
    for name, value in inputs.items():
        kept, timed = PLACES.search(name) is not None, TIMES.search(name) is not None
        inputs[name] = _placed(value, device, None if kept else dtype, requires_grad=not kept and not timed)
    cast(model, dtype)
    return model.to(device), inputs


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """As `from_pretrained(torch_dtype=dtype)` does: what the class keeps in float32 stays so."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def fill_zeros(model: torch.nn.Module) -> None:
    """Give parameters that begin as zeros a small value: behind them every gradient would be zero, and so equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(0, 0.02)


def _placed(value: Any, device: str, dtype: torch.dtype | None, requires_grad: bool) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.to(device)
        return value.to(dtype).requires_grad_(requires_grad) if dtype and value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _placed(item, device, dtype, requires_grad) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(item, device, dtype, requires_grad) for item in value)
    return value
