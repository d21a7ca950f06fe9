"""Finds the model inside what a training script wraps it in, and what of that is at odds with fastac."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fastac.errors import FastacError


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


def refuse_other_checkpointing(model: torch.nn.Module) -> None:
    """Raise FastacError where DeepSpeed is told to do something with what its own checkpointing keeps.

    The options of `activation_checkpointing` act inside deepspeed.checkpointing.checkpoint alone, in whose place fastac
    comes: none of them would be heeded. Read are the engine around a model, and what accelerate would build one from.
    """
    for config in (*_configs_around(model), *_configs_of_accelerate()):
        options = config.get("activation_checkpointing") or {}
        asked = [f"activation_checkpointing.{name}" for name, value in options.items() if value]
        if asked:
            raise FastacError(
                f"enable: DeepSpeed's configuration has {', '.join(asked)}. That acts only inside "
                f"deepspeed.checkpointing.checkpoint, which fastac takes the place of. Take it out of the "
                f"configuration, or do not use fastac for this model."
            )


def _configs_around(model: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """What wrappers that hold a model as `module` were configured with; DeepSpeed's engine may keep the path of it."""
    inner: torch.nn.Module | None = model
    while inner is not None:
        config = getattr(inner, "config", None) if "module" in inner._modules else None
        if isinstance(config, str) and Path(config).is_file():
            config = json.loads(Path(config).read_text())
        if isinstance(config, Mapping):
            yield config
        outer, inner = inner, _inner(inner)
        inner = None if inner is outer else inner


def _configs_of_accelerate() -> Iterator[Mapping[str, Any]]:
    accelerate = sys.modules.get("accelerate.state")  # where nobody has loaded it, it prepares nothing
    if accelerate is not None and accelerate.is_initialized():
        plugin = accelerate.AcceleratorState().deepspeed_plugin
        if plugin is not None:
            yield plugin.deepspeed_config
