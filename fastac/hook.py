"""enable and disable: fastac as a diffusers model's gradient checkpointing function."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fastac import census, interception, models, registry
from fastac.checkpointing import ENGINES, checkpoint
from fastac.errors import FastacError, PolicyNotAppliedError, UnsupportedBackendError
from fastac.policy import BlockPolicies, Policy, resolve, resolve_blocks, saves_nothing
from fastac.preflight import refuse_wrapped, unavailable
from fastac.registry import BackendUse
from fastac.rows import Verdict

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
    engine: str = "tape",
) -> None:
    """Checkpoint a diffusers model's blocks so that what the policy names is saved and the rest recomputed.

    Takes the place of `model.enable_gradient_checkpointing()`. policy: "attn_only", "long_attn_only", "full", a
    fastac.Policy, or a mapping of block-name patterns to these (the first that matches counts).
    Raises UnsupportedBackendError when an attention module's backend can not be honoured, FastacError for a model
    without gradient checkpointing, an unknown policy or engine, or blocks that are checkpointed already. The model
    is as it was then.
    """
    _check_model(model)
    if engine not in ENGINES:
        raise FastacError(f"enable(engine={engine!r}): there are {', '.join(ENGINES)}")
    containers = models.containers(model, models.row_of(model))
    if not containers:
        raise FastacError(
            f"enable: found no transformer blocks in {type(model).__name__}: no module list whose members hold "
            f"attention. Call fastac.checkpoint(block, *args) where the model calls its blocks."
        )
    blocks = {name: block for container in containers for name, block in container.blocks.items()}
    selected: Policy | BlockPolicies
    selected = resolve_blocks(policy, blocks) if isinstance(policy, Mapping) else resolve(policy)
    refuse_wrapped(model)
    interception.install()
    check_backends(model, selected)

    before = {module: _Before(module.gradient_checkpointing, _function_of(module)) for module in _switches(model)}
    function = functools.partial(checkpoint, policy=selected, engine=engine)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=function)  # type: ignore[operator]
    for module, state in before.items():
        if not is_ours(state.function):
            _before[module] = state
    for name, block in blocks.items():
        record = census.block_record(block)
        if record is not None:
            record.name = f"{type(model).__name__}.{name}"
            record.latest = record.latest_key = None  # what another policy did is no longer so
    for module in before:
        if _check_before_forward not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_check_before_forward)
    logger.info("%s: policy %s, engine %s, %d blocks", type(model).__name__, selected, engine, len(blocks))


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: the model's gradient checkpointing is again what it was when fastac came in.

    Does nothing to a model that fastac is not enabled on. A copy of an enabled model is left without checkpointing.
    Raises FastacError for what is no module.
    """
    check_module(model, "disable")
    for module in _switches(model):
        if not is_ours(_function_of(module)):
            continue
        state = _before.pop(module, _Before(False, None))
        _set(module, state.flag, state.function)
    for module in _switches(model):
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _check_before_forward]:
            del module._forward_pre_hooks[key]


def snapshot(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """The gradient checkpointing of a model as it is, for `restore`."""
    return {
        module: (
            module.gradient_checkpointing,
            _function_of(module),
            dict(module._forward_pre_hooks),
            _before.get(module),
        )
        for module in _switches(model)
    }


def restore(model: torch.nn.Module, state: dict[torch.nn.Module, Any]) -> None:
    """Put a model's gradient checkpointing back to what `snapshot` saw, fastac's own or not."""
    disable(model)
    for module, (flag, function, hooks, before) in state.items():
        _set(module, flag, function)
        if before is not None:
            _before[module] = before
        for key, forward_hook in hooks.items():
            module._forward_pre_hooks.setdefault(key, forward_hook)


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


def check_backends(model: torch.nn.Module, policy: Policy | BlockPolicies) -> None:
    """Raise UnsupportedBackendError when attention modules use a backend that the policy can not be honoured on."""
    saves = not saves_nothing(policy)
    for use in registry.backend_uses(model):
        if isinstance(policy, BlockPolicies):
            saves = not _block_policy(model, policy, use.module).saves_nothing
        if use.verdict is Verdict.NOT_TRAINABLE or (saves and not use.family):
            verdict = use.verdict.value.replace("_", " ")
            raise UnsupportedBackendError(_refusal(model, policy, use, f"is {verdict}: {use.reason}"))
        if saves and (missing := unavailable(use.family, use.op)) is not None:
            raise UnsupportedBackendError(_refusal(model, policy, use, f"can not be saved here: {missing}"))


def _block_policy(model: torch.nn.Module, policies: BlockPolicies, module_name: str) -> Policy:
    names = {block: name for name, block in model.named_modules() if block in policies}
    for block, name in names.items():
        if module_name == name or module_name.startswith(name + "."):
            return policies[block]
    return Policy("full")  # outside the checkpointed blocks nothing is saved


def _refusal(model: torch.nn.Module, policy: Policy | BlockPolicies, use: BackendUse, reason: str) -> str:
    where = f"{type(model).__name__}.{use.module}" if use.module else type(model).__name__
    way_out = "" if use.verdict is Verdict.NOT_TRAINABLE else ', or policy="full"'
    return (
        f"{policy}: backend {use.backend!r} at {where} {reason}. "
        f'Use transformer.set_attention_backend("native"){way_out}; `fastac backends` lists what can be saved here.'
    )


def check_module(model: object, call: str) -> None:
    """Raise FastacError for what is no module; `call` is the public function that was given it."""
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"{call}: expected a model, got {type(model).__name__}. With a pipeline, pass its transformer: "
            f"{call}(pipe.transformer)."
        )


def _check_model(model: torch.nn.Module) -> None:
    check_module(model, "enable")
    name = type(model).__name__
    inner = getattr(model, "module", None)
    if not hasattr(model, "enable_gradient_checkpointing") and hasattr(inner, "enable_gradient_checkpointing"):
        raise FastacError(f"enable: {name} wraps a {type(inner).__name__}. Pass that one: enable(model.module).")
    if not hasattr(model, "enable_gradient_checkpointing"):
        raise FastacError(
            f"enable: {name} has no enable_gradient_checkpointing, so it is no diffusers model. "
            f"Call fastac.checkpoint(block, *args) where the model calls its blocks."
        )
    if not getattr(model, "_supports_gradient_checkpointing", False):
        raise FastacError(
            f"enable: {name} does not support gradient checkpointing, so there is nothing to make selective"
        )


def _switches(model: torch.nn.Module) -> list[Any]:
    # Not hasattr(module, ...): wrappers such as PeftModel pass on what their inner model has.
    name = "gradient_checkpointing"
    return [module for module in model.modules() if name in vars(module) or hasattr(type(module), name)]


def _function_of(module: torch.nn.Module) -> Any:
    return vars(module).get("_gradient_checkpointing_func", _ABSENT)


def _runs_another(module: Any) -> bool:
    return bool(module.gradient_checkpointing) and not is_ours(_function_of(module))


def _check_before_forward(module: torch.nn.Module, args: Any) -> None:
    """Raise PolicyNotAppliedError when somebody replaced fastac's function: its blocks would be fully recomputed."""
    if torch.is_grad_enabled() and _runs_another(module):
        raise PolicyNotAppliedError(
            f"{type(module).__name__}: gradient checkpointing was enabled again without fastac, so nothing would be "
            f"saved. Call fastac.enable(model) after enable_gradient_checkpointing(), or fastac.disable(model) to "
            f"train without fastac."
        )
