"""Blocks that are inside torch's CheckpointWrapper already: accelerate's FSDP plugin and torch's own helpers do that.

Their checkpoint is taken over, not doubled: the wrapper stays where it is, since state-dict keys and FSDP know of it,
and what it checkpoints with is exchanged. `give_back` undoes that.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.errors import FastacError

_INNER = "_checkpoint_wrapped_module"
_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

_before: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def inside(module: Any) -> Any:
    """What is inside torch's activation wrappers (CheckpointWrapper, OffloadWrapper); what is in none, itself."""
    while _INNER in getattr(module, "_modules", ()):
        module = module._modules[_INNER]
    return module


def wrappers_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Every CheckpointWrapper inside a module, by qualified name."""
    loaded = sys.modules.get(_MODULE)  # where nobody has loaded it, there are none
    if loaded is not None:
        for name, inner in module.named_modules():
            if isinstance(inner, loaded.CheckpointWrapper):
                yield name, inner


def _around(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The CheckpointWrappers from a module inwards to the first that is no activation wrapper."""
    inner = inside(module)
    return ((name, one) for name, one in wrappers_of(module) if inside(one) is inner)


def plain_name(name: str) -> str:
    """A qualified name as it is without activation wrappers."""
    return ".".join(part for part in name.split(".") if part != _INNER)


def check(module: torch.nn.Module, where: str, blocks: Collection[torch.nn.Module] = ()) -> None:
    """Raise FastacError for CheckpointWrappers inside a module that can not be taken over.

    Those are: around what is none of its blocks, where attention would run twice and be kept; and those that do not
    checkpoint as torch does by default.
    """
    for name, wrapper in wrappers_of(inside(module)):
        if inside(wrapper) in blocks:
            _refuse_other(wrapper, f"{where}.{plain_name(name)}")
            continue
        raise FastacError(
            f"{where}.{plain_name(name)} is wrapped in torch's CheckpointWrapper, and is no block but a "
            f"part of one or beside them, so that it would be checkpointed twice. Wrap the blocks alone, which fastac "
            f"takes over, or do not use fastac for it."
        )


def take_over(module: Any, function: Callable[..., Any], where: str) -> bool:
    """Let the CheckpointWrappers around a module's inner one call a function in the place of torch's checkpoint.

    Returns whether there is one. Raises FastacError where it does not checkpoint as torch's does by default.
    """
    wrappers = [wrapper for _, wrapper in _around(module)]
    for wrapper in wrappers:
        if wrapper not in _before:
            _refuse_other(wrapper, where)
            _before[wrapper] = wrapper.checkpoint_fn
        wrapper.checkpoint_fn = function
    return bool(wrappers)


def give_back(module: torch.nn.Module) -> None:
    """Let every CheckpointWrapper inside a module checkpoint as it did before `take_over`."""
    for _, wrapper in wrappers_of(module):
        if wrapper in _before:
            wrapper.checkpoint_fn = _before.pop(wrapper)


def snapshot(module: torch.nn.Module) -> Callable[[], None]:
    """A function that puts the wrappers inside a module back to what they are now."""
    taken = [
        (wrapper, wrapper.checkpoint_fn, _before[wrapper]) for _, wrapper in wrappers_of(module) if wrapper in _before
    ]

    def restore() -> None:
        for wrapper, function, before in taken:
            wrapper.checkpoint_fn, _before[wrapper] = function, before

    return restore


def call_plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a wrapper calls whose module checkpoints itself."""
    return function(*args, **kwargs)


def _refuse_other(wrapper: Any, where: str) -> None:
    if wrapper in _before:
        return
    function = wrapper.checkpoint_fn
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    own = getattr(function, "func", None) is not torch_checkpoint
    what = "another checkpoint_fn" if own else "reentrant, with a context_fn or in debug mode"
    if own or keywords.get("use_reentrant") or keywords.get("context_fn") or keywords.get("debug"):
        raise FastacError(
            f"{where} is wrapped in a CheckpointWrapper that does not checkpoint as torch does by default "
            f"({what}), which fastac can not take over. Wrap it without these options, or take the wrapper away."
        )
