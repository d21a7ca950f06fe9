"""Sentences on what may explain a recompute that differs from its forward.

They are made when a difference becomes an error. An accelerator's differences are read at the end of the backward, when
the region is gone, so there they are made for every difference that may turn out to be an error.

Each sentence says what was found in this block, not what is likely: hooks that recompute does not run, a generator that
it does not restore, a setting of the compiler.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import MANY, block_of, globals_of, held_by, is_compiled


def likely_causes(function: Any, modules: Sequence[torch.nn.Module], values: Iterable[Any], stance: str) -> str:
    """The sentences, as a line with its line break; "" if there are none.

    Args:
        function: the checkpointed function.
        modules: the block, or the modules that the function may run.
        values: the function's keyword arguments.
        stance: the stance of torch.compiler in the forward.
    """
    sentences = [*_hooks(function), *_generators(function, modules, values), *_compiler(function, stance)]
    return " ".join(sentences) + "\n" * bool(sentences)


def _hooks(function: Any) -> Iterator[str]:
    """About hooks on a block, if the function is the block's `forward`."""
    # nn.Module.__call__ runs hooks around `forward`. If only `forward` is checkpointed, recompute does not run them.
    # The names `__call__` and `_call_impl` are torch's: these functions run the hooks themselves.
    block = None if isinstance(function, torch.nn.Module) else block_of(function)
    if block is None or "call" in function.__name__:
        return
    hooks = [*block._forward_pre_hooks.values(), *block._forward_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]
    foreign = [function for function in functions if _package(function) not in _QUIET]
    names = [getattr(function, "__name__", type(function).__name__) for function in foreign]
    if names:
        yield (
            f"Forward hooks on the block ({', '.join(list(dict.fromkeys(names))[:3])}) do not run again in recompute: "
            f"its `forward` is checkpointed, inside them. If it needs what they do (they load weights, say), use "
            f"fastac.patch_checkpoint(), or fastac.enable without blocks=... on a diffusers model."
        )


_QUIET = ("torch", "fastac")
"""Packages whose hooks recompute does not need: FSDP2 gathers weights in a recompute by hooks of autograd."""


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _generators(function: Any, modules: Sequence[torch.nn.Module], values: Iterable[Any]) -> Iterator[str]:
    """About generators that the block has, or is given."""
    # fastac restores the default generators. Nobody can tell which of other generators a block draws from.
    forward = type(function).forward if isinstance(function, torch.nn.Module) else function
    candidates = [("", value) for value in (*values, *held_by(forward), *globals_of(forward))]
    for module in modules:
        for prefix, inner in itertools.islice(module.named_modules(), MANY):  # a closure may hold the whole model
            candidates += [(f"{prefix}.{name}".lstrip("."), value) for name, value in vars(inner).items()]
    numpy = sys.modules.get("numpy.random")
    generators = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))
    for name, value in candidates:
        if isinstance(value, generators) and value is not torch.default_generator:
            yield (
                f"It has a {type(value).__name__} of {_package(type(value))}{f', {name}' * bool(name)}, which "
                f"recompute does not restore: draw random numbers from the default generator, or outside the block."
            )
            return


def _compiler(function: Any, stance: str) -> Iterator[str]:
    """About settings of the compiler, under which code may save other tensors."""
    current, budget = torch_private.stance(), torch_private.memory_budget()
    if (stance, current) != ("default", "default"):
        yield (
            f'The stance of torch.compiler is "{stance}" in the forward and "{current}" in recompute: one of them may '
            f'run compiled, the other not. Keep it at "default" until backward is done.'
        )
    if budget < 1 and is_compiled(function):
        yield (
            f"torch._functorch.config.activation_memory_budget is {budget}: code compiled under it saves less. "
            f"Leave it at 1."
        )
