"""Checkpointing of blocks whose model has no hook for it: a block's own `forward` opens the region.

Module hooks can not stand in for a call, and a wrapper module would rename state-dict keys, so the block gets an
attribute `forward`, as accelerate and diffusers do it. It can be copied and pickled together with the block.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastac import linear
from fastac.block_selection import container_of
from fastac.checkpoint_wrappers import call_plainly, inside, plain_name, take_over
from fastac.checkpointing import checkpoint
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.models import has_switch
from fastac.policy import BlockPolicies, Policy
from fastac.ranks import class_name

logger = logging.getLogger("fastac")

Paths = Mapping[str, list[torch.nn.Module | None]]

_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) - {"args", "kwargs"}


@dataclasses.dataclass
class Setting:
    """How a model's blocks are checkpointed."""

    policy: Policy | BlockPolicies
    engine: str

    def policy_of(self, block: torch.nn.Module) -> Policy | None:
        """The policy of one of the model's blocks."""
        return self.policy.of(block) if isinstance(self.policy, BlockPolicies) else self.policy


@dataclasses.dataclass
class _Block:
    """One checkpointed block. before: the attribute `forward` it had, None where its class's served.

    ran: whether it was called since. watch: that of the model it was enabled with.
    """

    module: torch.nn.Module
    before: Callable[..., Any] | None
    policy: Policy
    engine: str
    watch: Watch
    ran: bool = False

    @property
    def forward(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module) if self.before is None else self.before


def put_on(model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], setting: Setting) -> None:
    """Checkpoint the forward of blocks, none of which is so already, and watch over it from the model's."""
    watch = Watch(tuple(blocks))
    for block in blocks.values():
        policy = setting.policy
        if isinstance(policy, BlockPolicies):
            policy = policy[getattr(block, "_orig_mod", block)]
        own = _Block(block, vars(block).get("forward"), policy, setting.engine, watch)
        _set(block, functools.partial(_run, own))
    watch.take_over(model, watch.paths(model))
    model.register_forward_pre_hook(watch.before)
    model.register_forward_hook(watch.after)


def take_off(model: torch.nn.Module) -> None:
    """Give every block inside a model its own forward back, and take the hooks off its Linear modules.

    Raises FastacError where somebody wrapped the forward since: taking ours out would take theirs along. Nothing is
    changed then.
    """
    refuse_hooked(model)
    linear.take_off(model)
    for own in checkpointed(model).values():
        _set(own.module, own.before)
    for hooks, key, _ in _watches(model):
        del hooks[key]


def refuse_hooked(model: torch.nn.Module) -> None:
    """Raise FastacError when a block's forward was wrapped since it was checkpointed."""
    for name, own in checkpointed(model).items():
        if not _is_ours(vars(own.module).get("forward")):
            raise FastacError(
                f"disable: the forward of {class_name(model)}.{name} was wrapped since fastac.enable. Take that "
                f"hook off first, then disable."
            )


def _set(block: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
    # Into the dict: a class may have a __setattr__ of its own.
    if forward is None:
        del vars(block)["forward"]
    else:
        vars(block)["forward"] = forward


def _watches(model: torch.nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """Where the hooks of watches and budgets are, inside a model: the dict of hooks, the key in it, the hook."""
    return [
        (hooks, key, hook)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in hooks.items()
        if isinstance(getattr(hook, "__self__", None), Watch)
    ]


def snapshot(model: torch.nn.Module) -> Callable[[], None]:
    """A function that puts back the checkpointed forwards inside a model as they are now, after `take_off`."""
    forwards = [(own.module, vars(own.module)["forward"]) for own in checkpointed(model).values()]
    watches = _watches(model)

    def restore() -> None:
        for block, forward in forwards:
            _set(block, forward)
        for hooks, key, hook in watches:
            hooks[key] = hook

    return restore


def checkpointed(model: torch.nn.Module) -> dict[str, _Block]:
    """The blocks of a model that `put_on` was called for, by qualified name."""
    found = {plain_name(name): _find(module) for name, module in model.named_modules()}
    return {name: own for name, own in found.items() if own is not None}


def setting_of(model: torch.nn.Module) -> Setting | None:
    """How the blocks of a model are checkpointed; None where no forward of a block is ours."""
    blocks = list(checkpointed(model).values())
    if not blocks:
        return None
    policies = {own.policy for own in blocks}
    if len(policies) == 1:
        return Setting(blocks[0].policy, blocks[0].engine)
    return Setting(BlockPolicies({own.module: own.policy for own in blocks}), blocks[0].engine)


def _find(block: torch.nn.Module) -> _Block | None:
    """Ours among a block's forwards: itself, or inside hooks that were put around it."""
    forward = vars(block).get("forward")
    while forward is not None and not _is_ours(forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward.args[0] if forward is not None and forward.args[0].module is block else None


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is _run


def _run(own: _Block, /, *args: Any, **kwargs: Any) -> Any:
    own.ran = True
    if not torch.is_grad_enabled():
        return own.forward(*args, **kwargs)
    if not _OPTIONS.isdisjoint(kwargs):
        taken = ", ".join(sorted(_OPTIONS.intersection(kwargs)))
        raise FastacError(
            f"{class_name(own.module)} is called with keyword arguments of the name of an option of "
            f"fastac.checkpoint ({taken}). Give them by position, or under another name."
        )
    return checkpoint(own.forward, *args, policy=own.policy, engine=own.engine, **kwargs)


def refuse_lost(model: torch.nn.Module) -> None:
    """Raise PolicyNotAppliedError when a block that was enabled inside a model is not checkpointed any more."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            watch = getattr(hook, "__self__", None)
            if isinstance(watch, Watch):
                watch.check(module, watch.paths(module))


@dataclasses.dataclass(eq=False)
class Watch:
    """Forward hooks of a model whose blocks are checkpointed: that they are so still, and that they are called at all.

    names: qualified names of the blocks. told: whether it was told of blocks that are never called.
    """

    names: tuple[str, ...]
    told: bool = False

    def before(self, model: torch.nn.Module, args: Any) -> None:
        """Raise PolicyNotAppliedError for a block that is not checkpointed as it was enabled."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            paths = self.paths(model)
            self.check(model, paths)
            self.take_over(model, paths)

    def paths(self, model: torch.nn.Module) -> Paths:
        """The modules from the model down to each block, by the block's name."""
        return {name: list(_path(model, name)) for name in self.names}

    def take_over(self, model: torch.nn.Module, paths: Paths) -> None:
        """Let wrappers around the blocks, also such as came since, call them without a checkpoint of their own."""
        for name, path in paths.items():
            if path[-1] is not inside(path[-1]):
                take_over(path[-1], call_plainly, f"{class_name(model)}.{name}")

    def check(self, model: torch.nn.Module, paths: Paths) -> None:
        """Raise PolicyNotAppliedError for a block that is not checkpointed as it was enabled, or is so twice."""
        above = {model}
        for name, path in paths.items():
            block = inside(path[-1])
            own = _find(block) if block is not None else None
            if own is None or own.watch is not self:
                raise PolicyNotAppliedError(
                    f"{class_name(model)}: block {name!r} is not checkpointed as fastac.enable left it: it was "
                    f"exchanged, its forward set by a hook that came or went, or it was enabled or disabled elsewhere "
                    f"(as a part of another model). Call fastac.enable again."
                )
            above.update(module for module in path if module is not None)
        for module in above:
            if has_switch(module) and module.gradient_checkpointing:
                raise PolicyNotAppliedError(
                    f"{class_name(model)}: gradient checkpointing of {class_name(module)} was switched on since "
                    f"fastac.enable(model, blocks=...), so blocks are checkpointed twice and attention runs again. "
                    f"Switch it off."
                )

    def after(self, model: torch.nn.Module, args: Any, outputs: Any) -> None:
        """Raise PolicyNotAppliedError when the model ran and called no block; tell of lists of which it called none."""
        if self.told or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        containers: dict[str, bool] = {}
        for name in self.names:
            block = inside(list(_path(model, name))[-1])
            own = _find(block) if block is not None else None
            parent = container_of(name)
            containers[parent] = containers.get(parent, False) or (own is not None and own.ran)
        if not any(containers.values()):
            raise PolicyNotAppliedError(
                f"{class_name(model)} ran, and none of its {len(self.names)} blocks was called ({self.names[0]!r}, "
                f"...): nothing was checkpointed. Name the modules that it calls: enable(model, blocks=...)."
            )
        self.told = True
        idle = [repr(name) for name, ran in containers.items() if not ran]
        if idle:
            logger.warning(
                "%s ran, and no block of %s was called: where it calls parts of them, these are not checkpointed",
                class_name(model),
                ", ".join(idle),
            )


def _path(model: torch.nn.Module, name: str) -> Iterator[torch.nn.Module | None]:
    """The modules from a model down to the one of a name, which is None where it is gone."""
    module: torch.nn.Module | None = model
    yield module
    for part in filter(None, name.split(".")):
        module = inside(module)._modules.get(part) if module is not None else None
        yield module
