"""Reads which modules of a model are its transformer blocks: from its catalogue row, or from its structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model class of diffusers, in one way to use it.

    variant: tells the rows of one class apart, such as text to video from image to video; the first row of a class is
    the one that stands for it. containers: dotted names of the module lists whose members the model checkpoints one by
    one. config: keyword arguments of a tiny model, with random weights, for `fastac check` and tests. inputs: makes
    its keyword arguments for one call, from the standard normal distribution.
    linear: names of the attention modules in a block that are linear attention, which has no kernel to save.
    flex: its self-attention is flex_attention, whatever backend is set, which has no backward on the CPU.
    """

    class_name: str
    variant: str = ""
    containers: tuple[str, ...]
    config: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    linear: tuple[str, ...] = ()
    flex: bool = False

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
        return "|".join(dict.fromkeys(type(block).__name__ for block in self.blocks.values()))


def containers(model: torch.nn.Module, row: ModelRow | None = None) -> list[BlockContainer]:
    """The outermost block containers of a model; without a row, every module list whose members hold attention."""
    found: list[BlockContainer] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) == 0:
            continue
        if any(name.startswith(outer.name + ".") for outer in found):
            continue
        listed = row is not None and name in row.containers
        if listed or (row is None and all(_has_attention(block) for block in module)):
            found.append(BlockContainer(name, {f"{name}.{i}": block for i, block in enumerate(module)}))
    return found


def _has_attention(block: torch.nn.Module) -> bool:
    return any(hasattr(inner, "processor") or "attention" in type(inner).__name__.lower() for inner in block.modules())


def tiny_model(
    row: ModelRow, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of a row with random weights, in training mode, and its keyword arguments for one call.

    Parameters that begin as zeros get small values, since every gradient behind them would be zero. Floating inputs
    require grad.
    """
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = getattr(diffusers, row.class_name)(**row.config).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.numel() and not parameter.any():
                    parameter.normal_(0, 0.02)
        inputs = row.inputs()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            value = value.to(device)
            inputs[name] = value.to(dtype).requires_grad_() if value.is_floating_point() else value
    if dtype != torch.float32:
        model = model.to(dtype)
    return model.to(device), inputs
