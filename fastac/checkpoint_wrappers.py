"""Blocks that are inside torch's CheckpointWrapper already: accelerate's FSDP plugin and torch's own helpers do that.

Their checkpoint is taken over, not doubled: the wrapper stays where it is, since state-dict keys and FSDP know of it,
and what it checkpoints with is exchanged for a `TakenOver`, which knows what there was before and is copied along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.errors import FastacError

_INNER, _FSDP1 = "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
_OPTIONS = ("determinism_check", "early_stop")
"""Options of a wrapper's that hold for fastac's checkpoint as well. Generators are preserved in any case."""

_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@dataclasses.dataclass
class TakenOver:
    """What a wrapper calls in the place of torch's checkpoint. before: that one."""

    function: Callable[..., Any]
    before: functools.partial[Any]

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.function is call_plainly:
            return module(*args, **kwargs)
        kept = {name: self.before.keywords[name] for name in _OPTIONS if name in self.before.keywords}
        return self.function(module, *args, **kept, **kwargs)


def _chain(module: Any) -> Iterator[Any]:
    """A module, what is inside it as long as it is a wrapper of activations or of FSDP1, and the first that is none."""
    while module is not None:
        yield module
        children: Any = getattr(module, "_modules", ())
        name = next((name for name in (_INNER, _FSDP1) if name in children), None)
        module = None if name is None else children[name]


def inside(module: Any) -> Any:
    """What is inside torch's activation wrappers (CheckpointWrapper, OffloadWrapper); what is in none, itself."""
    found = module
    while True:  # asked for at every call of a block: no generator
        children: Any = getattr(module, "_modules", ())
        if _INNER in children:
            found = module = children[_INNER]
        elif _FSDP1 in children:
            module = children[_FSDP1]
        else:
            return found


def _is_wrapper(module: Any) -> bool:
    loaded = sys.modules.get(_MODULE)  # where nobody has loaded it, there are none
    return loaded is not None and isinstance(module, loaded.CheckpointWrapper)


def _wrappers_around(module: Any) -> list[Any]:
    """The CheckpointWrappers around a module's inner one."""
    return [one for one in _chain(module) if _is_wrapper(one)]


def plain_name(name: str) -> str:
    """A qualified name as it is without activation wrappers."""
    if _INNER not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (_INNER, _FSDP1))


def check(module: torch.nn.Module, where: str, blocks: Collection[torch.nn.Module] = ()) -> None:
    """Raise FastacError for CheckpointWrappers inside a module that can not be taken over.

    Those are: around what is none of its blocks, where attention would run twice and be kept; and those that do not
    checkpoint as torch does by default.
    """
    for name, wrapper in inside(module).named_modules():
        if not _is_wrapper(wrapper):
            continue
        if inside(wrapper) not in blocks:
            raise FastacError(
                f"{where}.{plain_name(name)} is wrapped in torch's CheckpointWrapper, and is no block but a part of "
                f"one or beside them, so that it would be checkpointed twice. Wrap the blocks alone, which fastac "
                f"takes over, or do not use fastac for it."
            )
        _refuse_other(wrapper, f"{where}.{plain_name(name)}")


def take_over(module: Any, function: Callable[..., Any], where: str) -> bool:
    """Let the CheckpointWrappers around a module's inner one call a function in the place of torch's checkpoint.

    Returns whether there is one. Raises FastacError where it does not checkpoint as torch's does by default.
    """
    wrappers = _wrappers_around(module)
    for wrapper in wrappers:
        _refuse_other(wrapper, where)
        before = wrapper.checkpoint_fn
        wrapper.checkpoint_fn = TakenOver(function, before.before if isinstance(before, TakenOver) else before)
    return bool(wrappers)


def take_over_all(model: torch.nn.Module, function: Callable[..., Any]) -> None:
    """The same for every CheckpointWrapper inside a model."""
    for name, module in model.named_modules():
        if _is_wrapper(module):
            take_over(module, function, plain_name(name))


def calls_fastac(module: Any) -> bool:
    """Whether a CheckpointWrapper around a module's inner one was taken over, so as to checkpoint it."""
    functions = [wrapper.checkpoint_fn for wrapper in _wrappers_around(module)]
    return any(isinstance(one, TakenOver) and one.function is not call_plainly for one in functions)


@contextlib.contextmanager
def taken_over(module: Any, function: Callable[..., Any], where: str) -> Iterator[bool]:
    """As `take_over`, for one call."""
    before = [(wrapper, wrapper.checkpoint_fn) for wrapper in _wrappers_around(module)]
    try:
        yield take_over(module, function, where)
    finally:
        for wrapper, own in before:
            wrapper.checkpoint_fn = own


def give_back(model: torch.nn.Module) -> None:
    """Let every CheckpointWrapper inside a model checkpoint as it did before `take_over`."""
    for module in model.modules():
        if _is_wrapper(module) and isinstance(module.checkpoint_fn, TakenOver):
            module.checkpoint_fn = module.checkpoint_fn.before  # type: ignore[assignment]


def snapshot(model: torch.nn.Module) -> Callable[[], None]:
    """A function that puts the wrappers inside a model back to what they are now."""
    before: list[tuple[Any, Any]] = [(m, m.checkpoint_fn) for m in model.modules() if _is_wrapper(m)]

    def restore() -> None:
        for wrapper, function in before:
            wrapper.checkpoint_fn = function

    return restore


def call_plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a wrapper calls whose module checkpoints itself."""
    return function(*args, **kwargs)


def _refuse_other(wrapper: Any, where: str) -> None:
    function = wrapper.checkpoint_fn
    if isinstance(function, TakenOver):
        return
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    own = getattr(function, "func", None) is not torch_checkpoint
    what = "another checkpoint_fn" if own else "reentrant, with a context_fn or in debug mode"
    if own or keywords.get("use_reentrant") or keywords.get("context_fn") or keywords.get("debug"):
        raise FastacError(
            f"{where} is wrapped in a CheckpointWrapper that does not checkpoint as torch does by default "
            f"({what}), which fastac can not take over. Wrap it without these options, or take the wrapper away."
        )
