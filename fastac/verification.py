"""Proof on the user's model: the same outputs and gradients as without checkpointing, and attention run once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import block_forward, checkpoint_wrappers, errors, hook, interception, models
from fastac.checkpointing import checkpoint
from fastac.comparison import Step, as_found, fresh, run_forward, run_step
from fastac.errors import FastacError
from fastac.outcome import Verification, compare, raise_if_broken
from fastac.policy import BlockPolicies, Policy, policies_in, resolve
from fastac.ranks import Group, OtherRankFailed, class_name
from fastac.reporting import decided

REFERENCES = ("none", "full")


def verify(
    model: torch.nn.Module,
    *args: Any,
    policy: str | Policy | Mapping[str, str | Policy] | None = None,
    engine: str | None = None,
    blocks: Any = None,
    reference: str = "none",
    per_block: bool = False,
    **kwargs: Any,
) -> Verification:
    """Run a model without checkpointing and with a policy; compare outputs, every gradient, and kernel executions.

    args, kwargs: of one call of the model. policy, engine, blocks: as in `enable`; those it was given, for a model that
    is enabled.
    reference: "none", or "full" for a model that does not fit otherwise.
    per_block: run the model once under full checkpointing, then compare block by block on the inputs each had; needs
    the memory of one block. A module without diffusers' gradient checkpointing and blocks is taken as one block.
    Differences are allowed only where two runs of the reference differ, up to four times as much. A model that is
    compiled as a whole is another graph with checkpointing than without: there they are allowed up to four times what
    compiling the reference makes, and rounding. Executions are counted in the whole process: let nothing else train.
    Raises PolicyNotAppliedError when attention ran again that was to be saved, FastacError when a result differs.
    Parameters' gradients, buffers, generator states and checkpointing are as before afterwards.
    Among several processes every rank must call it, and it raises on all when it raises on one.
    """
    group = Group()
    try:
        return group.run(lambda: _verify(group, model, args, kwargs, policy, engine, blocks, reference, per_block))
    except OtherRankFailed as failed:
        kind = getattr(errors, failed.kind, FastacError)
        raise kind(f"verify failed on another rank. {failed}") from None


def _verify(
    group: Group,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Any,
    engine: str | None,
    blocks: Any,
    reference: str,
    per_block: bool,
) -> Verification:
    if reference not in REFERENCES:
        raise FastacError(f"verify(reference={reference!r}): there are {', '.join(REFERENCES)}")
    hook.check_module(model, "verify")
    inner = models.unwrapped(model)
    subject = class_name(inner)
    interception.install()
    block_forward.refuse_lost(inner)
    if blocks is None:
        blocks = [own.module for own in block_forward.checkpointed(inner).values()] or None
    setting = hook.setting_of(inner)
    if policy is None:
        policy = "attn_only" if setting is None else hook.policy_as_given(inner, setting)
    if engine is None:
        engine = "tape" if setting is None else setting.engine
    with as_found(model):
        if blocks is None and not hasattr(inner, "enable_gradient_checkpointing"):
            result = _verify_block(group, model, args, kwargs, policy, engine, reference)
        elif per_block:
            if blocks is not None:
                raise FastacError("verify(per_block=True) is for models that are enabled without blocks=...")
            result = _verify_blocks(group, model, args, kwargs, policy, engine, reference)
        else:
            result = _verify_model(group, model, args, kwargs, policy, engine, reference, blocks)
    result = dataclasses.replace(result, subject=subject)
    raise_if_broken(result)
    return result


def _verify_model(
    group: Group,
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    policy: Any,
    engine: str,
    reference: str,
    blocks: Any,
) -> Verification:
    inner: Any = models.unwrapped(model)

    def step() -> Step:
        return run_step(model, model, args, kwargs)

    def reference_step() -> Step:
        hook.disable(inner)
        checkpoint_wrappers.take_over_all(inner, checkpoint_wrappers.call_plainly)
        if blocks is not None:
            if reference == "full":
                hook.enable(inner, "full", blocks=blocks)
        elif reference == "full":
            inner.enable_gradient_checkpointing(_full_checkpoint)
        else:
            inner.disable_gradient_checkpointing()
        return step()

    def policy_step() -> Step:
        nonlocal policy
        hook.enable(inner, policy, engine=engine, blocks=blocks)
        found = step()
        if selected_is_budget:  # the next step is under what became of it
            policy = hook.policy_as_given(inner, _setting(inner))
        if found.calls or not found.graphs:
            return found
        calls = decided(inner, lambda block: -1, found.graphs).values()
        return dataclasses.replace(found, calls=[call for block in calls for call in block], in_graph=True)

    def eager_reference_step() -> Step:
        with torch.compiler.set_stance("force_eager"):
            return reference_step()

    selected = _selected(inner, policy, engine, blocks)
    selected_is_budget = any(one.is_budget for one in policies_in(selected))
    return compare(group, reference_step, policy_step, selected, reference, eager_reference_step)


def _selected(model: torch.nn.Module, policy: Any, engine: str, blocks: Any = None) -> Policy | BlockPolicies:
    hook.enable(model, policy, engine=engine, blocks=blocks)
    return _setting(model).policy


def _setting(model: torch.nn.Module) -> block_forward.Setting:
    setting = hook.setting_of(model)
    if setting is None:
        raise FastacError(f"verify: {class_name(model)} did not take a gradient checkpointing function")
    return setting


def _verify_block(
    group: Group, block: torch.nn.Module, args: Any, kwargs: Any, policy: Any, engine: str, reference: str
) -> Verification:
    def reference_step() -> Step:
        checkpoint_wrappers.take_over_all(block, checkpoint_wrappers.call_plainly)
        return run_step(block, _full_checkpoint if reference == "full" else _plain, (block, *args), kwargs)

    def policy_step() -> Step:
        checkpoint_wrappers.give_back(block)
        function = functools.partial(checkpoint, policy=policy, engine=engine)
        return run_step(block, function, (block, *args), kwargs)

    selected = policy[block] if isinstance(policy, BlockPolicies) else resolve(policy)
    return compare(group, reference_step, policy_step, selected, reference)


def _verify_blocks(
    group: Group, model: torch.nn.Module, args: Any, kwargs: Any, policy: Any, engine: str, reference: str
) -> Verification:
    inner: Any = models.unwrapped(model)
    selected = _selected(inner, policy, engine)
    if any(one.is_budget and not one.per_block for one in policies_in(selected)):
        raise FastacError(
            "verify(per_block=True): a budget of all blocks is shared out in a step of the whole model. Verify without "
            "per_block, or train a step first and verify the policy that the model is enabled with."
        )
    regions: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    hook.disable(inner)
    checkpoint_wrappers.take_over_all(inner, checkpoint_wrappers.call_plainly)
    inner.enable_gradient_checkpointing(functools.partial(_captured, regions))
    run_forward(model, args, kwargs)
    if not group.agree(len(regions)):
        raise FastacError("verify(per_block=True): ranks have different numbers of blocks. Verify without per_block.")
    parts = [
        _verify_block(group, block, inputs, named, selected, engine, reference) for block, inputs, named in regions
    ]
    if not parts:
        raise FastacError(f"verify(per_block=True): {class_name(model)} checkpointed no block on these inputs")
    return Verification(
        subject=class_name(model),
        policy=parts[0].policy,
        reference=reference,
        compared=sum(part.compared for part in parts),
        different=tuple(f"block {i}: {name}" for i, part in enumerate(parts) for name in part.different),
        broken=tuple(f"block {i}: {name}" for i, part in enumerate(parts) for name in part.broken),
        largest_difference=max(part.largest_difference for part in parts),
        noise=max(part.noise for part in parts),
        reference_executions=_sums(part.reference_executions for part in parts),
        policy_executions=_sums(part.policy_executions for part in parts),
        saved=sum(part.saved for part in parts),
        recomputed=sum(part.recomputed for part in parts),
        saved_bytes=sum(part.saved_bytes for part in parts),
        linear_saved=sum(part.linear_saved for part in parts),
        allowed_again=sum(part.allowed_again for part in parts),
    )


def _sums(pairs: Any) -> tuple[int, int]:
    forward, backward = zip(*pairs, strict=True)
    return sum(forward), sum(backward)


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _full_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _captured(regions: list[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        regions.append((function, *fresh((args, kwargs))))
    return _full_checkpoint(function, *args, **kwargs)
