"""Finds the model inside what a training script wraps it in, and the class below what it makes of that."""

from __future__ import annotations

import torch


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, FullyShardedDataParallel, torch.compile's OptimizedModule, PeftModel.

    In any order and number, and inside any other wrapper that holds a diffusers model as `module` (an engine of
    DeepSpeed). What is not wrapped comes back itself.
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


def class_name(module: object) -> str:
    """The name of a module's class as its author wrote it: of that, fully_shard makes a class FSDP<name>."""
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        _, kind = kind.__bases__
    return kind.__name__
