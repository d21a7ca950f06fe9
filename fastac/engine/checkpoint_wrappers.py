"""Modules that torch puts around a block: CheckpointWrapper, OffloadWrapper, and wrappers of FSDP1 in between."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.errors import FastacError

# Attributes in which torch's wrappers hold the module. torch has names for them in private modules, which take time to
# import: torch.distributed.algorithms._checkpoint.checkpoint_wrapper and torch.distributed.fsdp._common_utils.
CHECKPOINT, FSDP1 = "_checkpoint_wrapped_module", "_fsdp_wrapped_module"


def plain_name(name: str) -> str:
    """A qualified name without activation wrappers."""
    if CHECKPOINT not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (CHECKPOINT, FSDP1))


def is_wrapper(module: Any) -> bool:
    """Whether a module is a CheckpointWrapper."""
    # Nobody has a wrapper before this module is loaded, and loading it takes time.
    loaded = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return loaded is not None and isinstance(module, loaded.CheckpointWrapper)


def wrappers_around(module: Any) -> Iterator[Any]:
    """The CheckpointWrappers that a module consists of, the outer ones first, without wrappers of FSDP1."""
    while module is not None:
        if is_wrapper(module):
            yield module
        children = getattr(module, "_modules", {})
        module = children.get(CHECKPOINT, children.get(FSDP1))


def call_plainly(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """checkpoint_fn of a CheckpointWrapper whose module checkpoints itself: no checkpoint."""
    return function(*args, **kwargs)


@contextlib.contextmanager
def idle(model: torch.nn.Module) -> Iterator[None]:
    """A context in which no CheckpointWrapper in a model checkpoints."""
    wrappers: list[Any] = [module for module in model.modules() if is_wrapper(module)]
    functions = [wrapper.checkpoint_fn for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.checkpoint_fn = call_plainly
        yield
    finally:
        for wrapper, function in zip(wrappers, functions, strict=True):
            wrapper.checkpoint_fn = function


def check_default(wrapper: Any, where: str) -> None:
    """Raise FastacError for a CheckpointWrapper with other options than torch's defaults. where: the block in it."""
    function = wrapper.checkpoint_fn
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    # The two differ while patch_checkpoint is on: then the second is fastac's.
    custom = getattr(function, "func", None) not in (torch_checkpoint, torch.utils.checkpoint.checkpoint)
    if custom or keywords.get("use_reentrant") or keywords.get("context_fn") or keywords.get("debug"):
        raise FastacError(
            f"{where} is wrapped in a CheckpointWrapper that does not checkpoint as torch does by default "
            f"({'another checkpoint_fn' if custom else 'reentrant, with a context_fn or in debug mode'}), which fastac "
            f"cannot take over. Wrap it without these options, or take the wrapper away."
        )
