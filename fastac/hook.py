"""enable and disable: fastac as a diffusers model's gradient checkpointing function, or around its blocks' forward."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastac import (
    block_forward,
    block_selection,
    census,
    checkpoint_wrappers,
    interception,
    linear,
    models,
    partitioner,
)
from fastac.block_forward import Setting
from fastac.checkpointing import ENGINES, checkpoint
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.models import BlockContainer
from fastac.policy import BlockPolicies, Policy, policy_of, resolve, resolve_blocks
from fastac.preflight import check_backends
from fastac.ranks import class_name
from fastac.remarks import remarks
from fastac.shares import as_given, shared, watch

logger = logging.getLogger("fastac")

_ABSENT = object()


@dataclasses.dataclass
class _Before:
    """A module's gradient checkpointing attributes as they were before fastac."""

    flag: Any
    function: Any


_before: weakref.WeakKeyDictionary[torch.nn.Module, _Before] = weakref.WeakKeyDictionary()


def enable(
    model: torch.nn.Module,
    policy: str | Policy | Mapping[str, str | Policy] = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    engine: str = "tape",
) -> None:
    """Checkpoint a model's blocks so that what the policy names is saved and the rest recomputed.

    Takes the place of `model.enable_gradient_checkpointing()` on a diffusers model, which may be inside
    DistributedDataParallel, torch.compile's OptimizedModule, a PeftModel or an engine of DeepSpeed. policy:
    "attn_only", "long_attn_only", "full", a fastac.Policy, or a mapping of block-name patterns to these (the first that
    matches counts). blocks: for any other model. The dotted name of a module list whose members are the blocks, or of
    one block; a module instead of a name; several of these. Their `forward` is checkpointed, state-dict keys stay.
    Raises UnsupportedBackendError when an attention module's backend can not be honoured, FastacError for a model
    without gradient checkpointing or blocks, an unknown policy or engine, or
    blocks that are checkpointed already. The model is as it was then.
    """
    check_module(model, "enable")
    outer, model = model, models.unwrapped(model)
    if engine not in ENGINES:
        raise FastacError(f"enable(engine={engine!r}): there are {', '.join(ENGINES)}")
    containers = _containers(model, blocks, outer)
    named = {name: block for container in containers for name, block in container.blocks.items()}
    selected: Policy | BlockPolicies
    selected = resolve_blocks(policy, named) if isinstance(policy, Mapping) else resolve(policy)
    checkpoint_wrappers.check(model, class_name(model), set(named.values()))
    interception.install()
    partitioner.inform_if_loaded()
    check_backends(model, selected)
    linear.check_names({block: policy_of(selected, block) for block in named.values()})
    selected = shared(selected, named)

    if blocks is None:
        block_forward.refuse_hooked(model)
        function = functools.partial(checkpoint, policy=selected, engine=engine)
        _switch_on(model, function)
        block_forward.take_off(model)
        checkpoint_wrappers.take_over_all(model, function)
    else:
        disable(model)
        block_forward.put_on(model, named, Setting(selected, engine))
    watch(model, selected)
    linear.expect({block: policy_of(selected, block) for block in named.values()})
    for name, block in named.items():
        record = census.block_record(block)
        if record is not None:
            record.begin(f"{class_name(model)}.{name}")
    logger.info("%s: policy %s, engine %s, %d blocks", class_name(model), selected, engine, len(named))
    for remark in remarks(model, containers):
        _tell(class_name(model), remark)


@functools.cache
def _tell(model: str, remark: str) -> None:
    logger.warning("%s: %s", model, remark)


def _containers(model: torch.nn.Module, blocks: Any, outer: torch.nn.Module) -> list[BlockContainer]:
    name = class_name(model)
    if blocks is not None:
        if any(module.gradient_checkpointing and not is_ours(_function_of(module)) for module in _switches(model)):
            raise FastacError(
                f"enable(blocks=...): gradient checkpointing of {name} is on already, so its blocks would be "
                f"checkpointed twice. Switch it off first, or enable(model) without blocks."
            )
        return block_selection.select(model, blocks, outer)
    check_switch(model, "enable")
    containers = block_selection.without_wrappers(models.containers(model, models.row_of(model)))
    if not containers:
        raise FastacError(
            f"enable: found no transformer blocks in {name}: no module list whose members hold attention. "
            f'Name them: enable(model, blocks="...").'
        )
    return containers


def _switch_on(model: torch.nn.Module, function: functools.partial[Any]) -> None:
    before = {module: _Before(module.gradient_checkpointing, _function_of(module)) for module in _switches(model)}
    model.enable_gradient_checkpointing(gradient_checkpointing_func=function)  # type: ignore[operator]
    for module, state in before.items():
        if not is_ours(state.function):
            _before[module] = state
        if _check_before_forward not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_check_before_forward)


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: the model's gradient checkpointing is again what it was when fastac came in.

    Does nothing to a model that fastac is not enabled on. A copy of an enabled model is left without checkpointing.
    Raises FastacError for what is no module, and for blocks whose forward was wrapped since.
    """
    check_module(model, "disable")
    model = models.unwrapped(model)
    block_forward.take_off(model)
    checkpoint_wrappers.give_back(model)
    for module in _switches(model):
        if not is_ours(_function_of(module)):
            continue
        state = _before.pop(module, _Before(False, None))
        _set(module, state.flag, state.function)
    for module in _switches(model):
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _check_before_forward]:
            del module._forward_pre_hooks[key]


@dataclasses.dataclass
class Snapshot:
    """The checkpointing of a model at one time. switches: flag, function and forward hooks by module.

    forwards, wrappers: put those of blocks back.
    """

    switches: dict[torch.nn.Module, Any]
    forwards: Callable[[], None]
    wrappers: Callable[[], None]


def snapshot(model: torch.nn.Module) -> Snapshot:
    """The checkpointing of a model as it is, for `restore`."""
    switches = {
        module: (
            module.gradient_checkpointing,
            _function_of(module),
            dict(module._forward_pre_hooks),
            _before.get(module),
        )
        for module in _switches(model)
    }
    return Snapshot(switches, block_forward.snapshot(model), checkpoint_wrappers.snapshot(model))


def restore(model: torch.nn.Module, state: Snapshot) -> None:
    """Put a model's checkpointing back to what `snapshot` saw, fastac's own or not."""
    disable(model)
    for module, (flag, function, hooks, before) in state.switches.items():
        _set(module, flag, function)
        if before is not None:
            _before[module] = before
        for key, forward_hook in hooks.items():
            module._forward_pre_hooks.setdefault(key, forward_hook)
    state.forwards()
    state.wrappers()


def _set(module: Any, flag: Any, function: Any) -> None:
    module.gradient_checkpointing = flag
    if function is not _ABSENT:
        module._gradient_checkpointing_func = function
    elif "_gradient_checkpointing_func" in vars(module):
        del module._gradient_checkpointing_func


def is_ours(function: object) -> bool:
    """Whether a gradient checkpointing function is the one that `enable` sets."""
    return isinstance(function, functools.partial) and function.func is checkpoint


def enabled_function(model: torch.nn.Module) -> functools.partial[Any] | None:
    """The function `enable` set on a model, with its policy and engine as keywords; None where it is gone."""
    for module in _switches(model):
        function = _function_of(module)
        if module.gradient_checkpointing and is_ours(function):
            return function  # type: ignore[no-any-return]
    return None


def setting_of(model: torch.nn.Module) -> Setting | None:
    """The policy and engine that `enable` set on a model, in either way; None where it did not, or no more."""
    function = enabled_function(model)
    return block_forward.setting_of(model) if function is None else Setting(**function.keywords)


def policy_as_given(model: torch.nn.Module, setting: Setting) -> Policy | dict[str, Policy]:
    """The policy of an enabled model as `enable` takes one: by the names of the blocks where they differ."""
    if isinstance(setting.policy, Policy):
        return setting.policy
    blocks = {name: block for container in containers_of(model) for name, block in container.blocks.items()}
    return {name: as_given(mine) for name, block in blocks.items() if (mine := setting.policy_of(block)) is not None}


def containers_of(model: torch.nn.Module) -> list[BlockContainer]:
    """The containers of the blocks that are checkpointed, or would be."""
    blocks = {name: own.module for name, own in block_forward.checkpointed(model).items()}
    if blocks:
        return block_selection.grouped(blocks)
    return block_selection.without_wrappers(models.containers(model, models.row_of(model)))


def was_replaced(model: torch.nn.Module) -> bool:
    """Whether gradient checkpointing is on, on a model that fastac was enabled on, with another function."""
    return any(
        _check_before_forward in module._forward_pre_hooks.values() and _runs_another(module)
        for module in _switches(model)
    )


def was_switched_off(model: torch.nn.Module) -> bool:
    """Whether fastac was enabled on a model whose gradient checkpointing is off now."""
    switches = [module for module in _switches(model) if _check_before_forward in module._forward_pre_hooks.values()]
    return bool(switches) and not any(module.gradient_checkpointing for module in switches)


def check_module(model: object, call: str) -> None:
    """Raise FastacError for what is no module; `call` is the public function that was given it."""
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"{call}: expected a model, got {type(model).__name__}. With a pipeline, pass its transformer: "
            f"{call}(pipe.transformer)."
        )


def check_switch(model: torch.nn.Module, call: str) -> None:
    """Raise FastacError for a model that can not switch gradient checkpointing on itself."""
    name = class_name(model)
    if not hasattr(model, "enable_gradient_checkpointing"):
        raise FastacError(
            f"{call}: {name} has no enable_gradient_checkpointing, so it is no diffusers model. Name its blocks: "
            f'{call}(model, blocks="transformer.layers"), or call fastac.checkpoint(block, *args) where it calls them.'
        )
    if not getattr(model, "_supports_gradient_checkpointing", False):
        raise FastacError(
            f'{call}: {name} has no gradient checkpointing of its own. Name its blocks: {call}(model, blocks="...").'
        )


def _switches(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if models.has_switch(module)]


def _function_of(module: torch.nn.Module) -> Any:
    return vars(module).get("_gradient_checkpointing_func", _ABSENT)


def _runs_another(module: Any) -> bool:
    return bool(module.gradient_checkpointing) and not is_ours(_function_of(module))


def _check_before_forward(module: torch.nn.Module, args: Any) -> None:
    """Raise PolicyNotAppliedError when somebody replaced fastac's function: its blocks would be fully recomputed."""
    if torch.is_grad_enabled() and _runs_another(module):
        raise PolicyNotAppliedError(
            f"{class_name(module)}: gradient checkpointing was enabled again without fastac, so nothing would be "
            f"saved. Call fastac.enable(model) after enable_gradient_checkpointing(), or fastac.disable(model) to "
            f"train without fastac."
        )
