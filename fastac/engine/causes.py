"""Sentences on what may explain a recompute that differs from its forward.

They are made when that is an error; on an accelerator, whose errors come at the end of a backward, in every region that
is compared.

Each says what was found there, not what is likely: hooks of the block that recompute does not run, a generator that it
does not restore, a setting of the compiler.
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


def found(function: Any, modules: Sequence[torch.nn.Module], values: Iterable[Any], stance: str) -> str:
    """What was found, as a line with its break; "" for nothing.

    Args:
        function: the checkpointed function.
        modules: the block, or those that the function may run.
        values: its arguments by keyword.
        stance: of torch.compiler in the forward.
    """
    sentences = [*_hooks(function), *_generators(function, modules, values), *_compiler(function, stance)]
    return " ".join(sentences) + "\n" * bool(sentences)


def _hooks(function: Any) -> Iterator[str]:
    """Of hooks on a block whose `forward` is the function: they run around it."""
    block = None if isinstance(function, torch.nn.Module) else block_of(function)
    if block is None or "call" in function.__name__:
        return
    hooks = [*block._forward_pre_hooks.values(), *block._forward_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]
    names = [getattr(one, "__name__", type(one).__name__) for one in functions if _package(one) not in _QUIET]
    if names:
        yield (
            f"Forward hooks on the block ({', '.join(list(dict.fromkeys(names))[:3])}) do not run again in recompute: "
            f"its `forward` is checkpointed, inside them. If it needs what they do (they load weights, say), use "
            f"fastac.patch_checkpoint(), or fastac.enable without blocks=... on a diffusers model."
        )


_QUIET = ("torch", "fastac")
"""Packages whose hooks recompute does not need: FSDP2 has hooks of autograd's as well."""


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _generators(function: Any, modules: Sequence[torch.nn.Module], values: Iterable[Any]) -> Iterator[str]:
    """Of generators that the block has, or is given."""
    forward = type(function).forward if isinstance(function, torch.nn.Module) else function
    places = [("", one) for one in (*values, *held_by(forward), *globals_of(forward))]
    for module in modules:
        for prefix, inner in itertools.islice(module.named_modules(), MANY):  # a closure may hold the whole model
            places += [(f"{prefix}.{name}".lstrip("."), one) for name, one in vars(inner).items()]
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))
    for name, one in places:
        if isinstance(one, kinds) and one is not torch.default_generator:
            yield (
                f"It has a {type(one).__name__} of {_package(type(one))}{f', {name}' * bool(name)}, which recompute "
                f"does not restore: draw random numbers from the default generator, or outside the block."
            )
            return


def _compiler(function: Any, stance: str) -> Iterator[str]:
    """Of settings of the compiler, under which code may save other tensors."""
    now, budget = torch_private.stance(), torch_private.memory_budget()
    if (stance, now) != ("default", "default"):
        yield (
            f'The stance of torch.compiler is "{stance}" in the forward and "{now}" in recompute: one of them may run '
            f'compiled, the other one not. Keep it at "default" until backward is done.'
        )
    if budget < 1 and is_compiled(function):
        yield (
            f"torch._functorch.config.activation_memory_budget is {budget}: code compiled under it saves less. "
            f"Leave it at 1."
        )
