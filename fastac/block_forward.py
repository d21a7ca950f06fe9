"""Checkpointing of blocks whose model has no hook for it: a block's own `forward` opens the region.

Module hooks can not stand in for a call, and a wrapper module would rename state-dict keys, so the block gets an
attribute `forward`, as accelerate and diffusers do it. It can be copied and pickled together with the block.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastac.checkpointing import checkpoint
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.models import BlockContainer
from fastac.policy import BlockPolicies, Policy

_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"}


@dataclasses.dataclass
class Setting:
    """How a model's blocks are checkpointed; one for all of them. ran: whether one of them was called since."""

    policy: Policy | BlockPolicies
    engine: str
    ran: bool = False


@dataclasses.dataclass
class _Block:
    """One checkpointed block. before: the attribute `forward` it had, None where its class's served."""

    module: torch.nn.Module
    before: Callable[..., Any] | None
    setting: Setting

    @property
    def forward(self) -> Callable[..., Any]:
        return self.before or types.MethodType(type(self.module).forward, self.module)


def select(model: torch.nn.Module, blocks: str | torch.nn.Module | Iterable[Any]) -> list[BlockContainer]:
    """The blocks that `enable(model, blocks=...)` was given, by the containers they are in.

    blocks: the dotted name of a module list, sequence or dict, whose members are the blocks, or of one block; a module
    of the model instead of a name; several of these. Raises FastacError for what is no part of the model, for no
    blocks at all, and for a block inside another.
    """
    several = [blocks] if isinstance(blocks, (str, torch.nn.Module)) else list(blocks)
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, torch.nn.Module] = {}
    for one in several:
        module = _by_name(model, one) if isinstance(one, str) else one
        if not isinstance(module, torch.nn.Module) or module not in names:
            raise FastacError(
                f"enable(blocks=...): {type(one).__name__} {_short(one)} is no module of {type(model).__name__}. "
                f'Give the dotted name of a module list, such as "transformer.layers", or modules of the model.'
            )
        containers = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
        for block in module.children() if isinstance(module, containers) else (module,):
            found[names[block]] = block
    if not found:
        raise FastacError(f"enable(blocks={_short(blocks)}): there is no block in it")
    for name in found:
        outer = [other for other in found if name != other and (not other or name.startswith(other + "."))]
        if outer:
            raise FastacError(f"enable(blocks=...): block {name!r} is inside block {outer[0]!r}. Name one of them.")
    return grouped(found)


def grouped(blocks: Mapping[str, torch.nn.Module]) -> list[BlockContainer]:
    """Blocks by qualified name, in one container for each module that holds some."""
    containers: dict[str, BlockContainer] = {}
    for name, block in blocks.items():
        parent = name.rpartition(".")[0] or name
        containers.setdefault(parent, BlockContainer(parent, {})).blocks[name] = block
    return list(containers.values())


def _short(value: object) -> str:
    text = "" if isinstance(value, torch.nn.Module) else repr(value)
    return text if len(text) < 80 else text[:80] + "..."


def _by_name(model: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        lists = [n for n, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
        known = f"Its module lists are {', '.join(map(repr, lists[:8]))}." if lists else "It has no module list."
        raise FastacError(f"enable(blocks={name!r}): {type(model).__name__} has no such module. {known}") from error


def put_on(
    model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], policy: Policy | BlockPolicies, engine: str
) -> None:
    """Checkpoint the forward of blocks, none of which is so already, and watch over it from the model's."""
    setting = Setting(policy, engine)
    for block in blocks.values():
        block.forward = functools.partial(_run, _Block(block, vars(block).get("forward"), setting))
    watch = Watch(blocks)
    model.register_forward_pre_hook(watch.before)
    model.register_forward_hook(watch.after)


def take_off(model: torch.nn.Module) -> None:
    """Give every block of a model its own forward back.

    Raises FastacError where somebody wrapped the forward since: taking ours out would take theirs along. Nothing is
    changed then.
    """
    found = checkpointed(model)
    for name, own in found.items():
        if not _is_ours(vars(own.module).get("forward")):
            raise FastacError(
                f"disable: the forward of {type(model).__name__}.{name} was wrapped since fastac.enable. Take that "
                f"hook off first, then disable."
            )
    for own in found.values():
        if own.before is None:
            del own.module.forward
        else:
            own.module.forward = own.before
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Watch)]:
            del hooks[key]


def checkpointed(model: torch.nn.Module) -> dict[str, _Block]:
    """The blocks of a model that `put_on` was called for, by qualified name."""
    found = {name: _find(module) for name, module in model.named_modules()}
    return {name: own for name, own in found.items() if own is not None}


def setting_of(model: torch.nn.Module) -> Setting | None:
    """How the blocks of a model are checkpointed; None where no forward of a block is ours."""
    return next((own.setting for own in checkpointed(model).values()), None)


def _find(block: torch.nn.Module) -> _Block | None:
    """Ours among a block's forwards: itself, or inside hooks that were put around it."""
    forward = vars(block).get("forward")
    while forward is not None and not _is_ours(forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward.args[0] if forward is not None and forward.args[0].module is block else None


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is _run


def _run(own: _Block, /, *args: Any, **kwargs: Any) -> Any:
    own.setting.ran = True
    if not torch.is_grad_enabled():
        return own.forward(*args, **kwargs)
    if not _OPTIONS.isdisjoint(kwargs):
        taken = ", ".join(sorted(_OPTIONS.intersection(kwargs)))
        raise FastacError(
            f"{type(own.module).__name__} is called with keyword arguments of the name of an option of "
            f"fastac.checkpoint ({taken}). Give them by position, or under another name."
        )
    policy = own.setting.policy
    if isinstance(policy, BlockPolicies):
        policy = policy.of(own.module) or policy  # what checkpoint says of a block without one
    return checkpoint(own.forward, *args, policy=policy, engine=own.setting.engine, **kwargs)


class Watch:
    """Forward hooks of a model whose blocks are checkpointed: that they are so still, and that they are called at all.

    names: of the blocks, to say which of them lost its forward.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def before(self, model: torch.nn.Module, args: Any) -> None:
        """Raise PolicyNotAppliedError when a block's forward was set to another since."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        lost = sorted(set(self.names) - checkpointed(model).keys())
        if lost:
            raise PolicyNotAppliedError(
                f"{type(model).__name__}: the forward of block {lost[0]!r} is not the one that fastac.enable set: a "
                f"hook was taken off, or the block exchanged. Its attention would not be saved. Call fastac.enable "
                f"again."
            )

    def after(self, model: torch.nn.Module, args: Any, outputs: Any) -> None:
        """Raise PolicyNotAppliedError when the model ran, and no block of it did."""
        setting = setting_of(model)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or setting is None or setting.ran:
            return
        raise PolicyNotAppliedError(
            f"{type(model).__name__} ran, and none of its {len(self.names)} blocks was called ({self.names[0]!r}, "
            f"...): nothing was checkpointed. Name the modules that it calls: enable(model, blocks=...)."
        )
