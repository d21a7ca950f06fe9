"""What can be known before anything runs: options, a block that is compiled or wrapped, a backend without hope."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fastac import census, checkpoint_wrappers, dispatcher_internals, opaque, registry
from fastac.errors import FastacError, PolicyNotAppliedError, UnsupportedBackendError
from fastac.policy import BlockPolicies, Policy, is_inside, saves_nothing
from fastac.ranks import class_name
from fastac.registry import BackendUse
from fastac.rows import AttentionOp, Verdict


def is_compiled(function: Any) -> bool:
    """Whether torch.compile was applied to a function, a block, or a module inside it."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    module = census.module_of(function)
    return module is not None and any(
        inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod") for inner in module.modules()
    )


def refuse_wrapped(function: Any) -> None:
    """Raise FastacError when a part of a block is checkpointed already: attention would run twice and be kept."""
    owner = census.module_of(function)
    if owner is not None:
        checkpoint_wrappers.check(owner, census.describe(function))


def refuse_strange_block(function: Any) -> NoReturn:
    """Raise FastacError for a block that is called under policies per block and has none."""
    refuse_wrapped(function)
    raise FastacError(
        f"{census.describe(function)} is called under policies per block, and is no block that fastac.enable saw. If "
        f"it was exchanged since, call fastac.enable again; else name the model's blocks: enable(model, blocks=...)."
    )


def refuse_switched(function: Any, policy: Policy) -> None:
    """Raise PolicyNotAppliedError for a block whose backend was switched since fastac.enable looked at it."""
    block = census.block_of(function)
    for use in registry.backend_uses(block) if block is not None else ():
        hopeless = use.verdict is Verdict.NOT_TRAINABLE
        if hopeless or (use.verdict is Verdict.OPAQUE and unavailable(use.family, use.op) is not None):
            where = ".".join(filter(None, (census.describe(function), use.module)))
            raise PolicyNotAppliedError(
                f"{policy}: {where} is set to backend {use.backend!r} ({use.verdict.value.replace('_', ' ')}): "
                f"{use.reason}. It was switched after fastac.enable, or enable was not called. Switch it back: "
                f"`fastac backends` lists what can be saved."
            )


def refuse_options(use_reentrant: bool | None) -> NoReturn:
    """Raise FastacError for an option of `checkpoint` that can not be honoured."""
    if use_reentrant:
        raise FastacError(
            "checkpoint(use_reentrant=True): reentrant checkpointing has no place to save anything. "
            "Use use_reentrant=False, which is the default here."
        )
    raise FastacError(
        "checkpoint(context_fn=...): fastac passes its own, which does the saving. Give it a policy instead."
    )


def refuse_debug(policy: Policy) -> NoReturn:
    """Raise FastacError for torch's checkpoint debug mode."""
    raise FastacError(
        f"checkpoint(policy={str(policy)!r}): torch's checkpoint debug mode replaces the contexts that do the "
        f'saving. Switch it off, or debug with policy="full".'
    )


def unavailable(family: str, name: str = "") -> str | None:
    """Why no attention op of a backend, or not the one of that name, can run on this machine; None when one can."""
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp) and op.row.backend == family]
    ops = [op for op in ops if op.row.name == name] or ops
    if not ops:
        known = {row.backend for row in registry.rows() if isinstance(row, AttentionOp)} | opaque.known_backends()
        if family not in known:
            return f"fastac has no row for {family} yet"
        return f"no op of {family} is loaded in this process: its library is not installed, or was not imported"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    keys = ["CPU", "CompositeExplicitAutograd"] + ([accelerator.type.upper()] if accelerator is not None else [])
    if not any(dispatcher_internals.has_kernel(op.qualified_name, key) for op in ops for key in keys):
        device = "the CPU" if accelerator is None else f"the CPU or {accelerator.type}"
        return f"{ops[0].name} has no kernel for {device}, which is all this machine has"
    return None


def check_backends(model: torch.nn.Module, policy: Policy | BlockPolicies) -> None:
    """Raise UnsupportedBackendError when attention modules use a backend that the policy can not be honoured on."""
    saves = not saves_nothing(policy)
    for use in registry.backend_uses(model):
        if use.linear:
            continue  # there is no kernel, so no backend
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
        if is_inside(module_name, name):
            return policies[block]
    return Policy("full")  # outside the checkpointed blocks nothing is saved


def _refusal(model: torch.nn.Module, policy: Policy | BlockPolicies, use: BackendUse, reason: str) -> str:
    where = f"{class_name(model)}.{use.module}" if use.module else class_name(model)
    way_out = "" if use.verdict is Verdict.NOT_TRAINABLE else ', or policy="full"'
    return (
        f"{policy}: backend {use.backend!r} at {where} {reason}. "
        f'Use transformer.set_attention_backend("native"){way_out}; `fastac backends` lists what can be saved here.'
    )
