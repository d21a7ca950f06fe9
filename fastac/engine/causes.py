"""Sentences on what may explain a recompute that differs from its forward.

They are made when a difference becomes an error. An accelerator's differences are read at the end of the backward, when
the region is gone, so there they are made for every difference that may turn out to be an error.

Each sentence says what was found in this block, not what is likely: a setting or hooks that only its forward had, a
generator that recompute does not restore, choices that it makes again.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.beginning import Beginning
from fastac.engine.blocks import MANY, block_of, describe, globals_of, held_by, is_compiled
from fastac.engine.process import thread


def explain(beginning: Beginning) -> str:
    """The sentences, as a line with its line break; "" if there are none."""
    function = beginning.function
    sentences = [*_contexts(beginning), *_choices(), *_hooks(function), *_generators(beginning), *_budget(function)]
    return " ".join(sentences) + "\n" * bool(sentences)


def _contexts(beginning: Beginning) -> Iterator[str]:
    """About contexts that were open when the forward began, or are in recompute."""
    for name, now in beginning.settings_now.items():
        before = beginning.settings.get(name, now)  # a library may have come since
        # Under that stance the first call of compiled code runs eagerly, and later ones do not.
        if before != now or now == '"eager_then_compile"':
            kept = '"default"' if "compiler" in name else "the same"
            yield f"{name} {before} in the forward and {now} in recompute: keep {kept} until backward is done."
    if beginning.user_hooks is not None:
        pack = describe(beginning.user_hooks[0])
        yield f'saved_tensors_hooks ({pack}) pack its inputs. If they are lossy on purpose: determinism_check="none".'


def _choices() -> Iterator[str]:
    """About choices that no policy kept, and recompute has made again."""
    if names := ", ".join(sorted(thread.choices)):
        yield (
            f'Policy "full" makes its choices ({names}) again, and scores may differ in their last bits. '
            f'policy="attn_only" keeps them; without attention, fastac.Policy("linear_only", linear=(...)).'
        )


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
    if names := dict.fromkeys(getattr(function, "__name__", type(function).__name__) for function in foreign):
        yield (
            f"Forward hooks on the block ({', '.join([*names][:3])}) do not run again in recompute: its `forward` is "
            f"checkpointed, inside them. If it needs what they do (they load weights, say), use "
            f"fastac.patch_checkpoint(), or fastac.enable without blocks=... on a diffusers model."
        )


_QUIET = ("torch", "fastac")
"""Packages whose hooks recompute does not need: FSDP2 gathers weights in a recompute by hooks of autograd."""


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _generators(beginning: Beginning) -> Iterator[str]:
    """About generators that the block has, or is given."""
    # fastac restores the default generators. Nobody can tell which of other generators a block draws from.
    forward = (
        type(beginning.function).forward if isinstance(beginning.function, torch.nn.Module) else beginning.function
    )
    candidates = [("", value) for value in (*beginning.kwargs.values(), *held_by(forward), *globals_of(forward))]
    for module in beginning.modules:
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


def _budget(function: Any) -> Iterator[str]:
    """About a setting of the compiler under which code saves less."""
    if (budget := torch_private.memory_budget()) < 1 and is_compiled(function):
        yield (
            f"torch._functorch.config.activation_memory_budget is {budget}: code compiled under it saves less. "
            f"Leave it at 1."
        )
