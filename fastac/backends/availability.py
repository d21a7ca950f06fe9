"""Check attention backends before anything runs: which cannot be saved, and which settings have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fastac import registry
from fastac.backends.diffusers import backend_uses as backend_uses
from fastac.backends.verdicts import BackendUse, Verdict
from fastac.engine import torch_private
from fastac.engine.blocks import is_inside
from fastac.errors import UnsupportedBackendError, class_name
from fastac.policy import BlockPolicies, Policy, saves_nothing
from fastac.registry import AttentionOp


def check_backends(
    model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], policy: Policy | BlockPolicies
) -> None:
    """Raise UnsupportedBackendError if an attention module uses a backend that the policy cannot save."""
    # A policy that saves nothing runs attention again, so it takes any kernel that trains.
    saves = not saves_nothing(policy)
    for use in backend_uses(model):
        if isinstance(policy, BlockPolicies):
            # An attention module outside all blocks is never recomputed, whatever the policies say.
            around = [block for name, block in blocks.items() if is_inside(use.module, name)]
            # Policies belong to the block itself, which may be inside torch.compile's OptimizedModule by now.
            saves = bool(around) and not policy[getattr(around[0], "_orig_mod", around[0])].saves_nothing
        # Such a backend is refused under "full" as well: recompute gives no backward to a kernel that has none.
        if use.verdict is Verdict.NOT_TRAINABLE or (saves and not use.family):
            raise _refusal(model, policy, use, f"is {use.verdict.value.replace('_', ' ')}: {use.reason}")
        # The table says what a backend can do. Whether its op is loaded and has a kernel depends on this process.
        if saves and (missing := unavailable(use.family, use.op)) is not None:
            raise _refusal(model, policy, use, f"cannot be saved here: {missing}")


def unavailable(family: str, name: str = "") -> str | None:
    """Why no attention op of a backend (or not the op of that name) can run on this machine; None if an op can."""
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp) and op.row.backend == family]
    ops = [op for op in ops if op.row.name == name] or ops
    if not ops:
        return f"no op of {family} is loaded in this process: its library is not installed, or was not imported"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # CompositeExplicitAutograd: a kernel for every device, as custom ops have that are written in Python.
    keys = ["CPU", "CompositeExplicitAutograd"] + ([accelerator.type.upper()] if accelerator is not None else [])
    if not any(torch_private.has_kernel(op.qualified_name, key) for op in ops for key in keys):
        device = "the CPU" if accelerator is None else f"the CPU or {accelerator.type}"
        return f"{ops[0].name} has no kernel for {device}, which is all this machine has"
    return None


def _refusal(
    model: torch.nn.Module, policy: Policy | BlockPolicies, use: BackendUse, reason: str
) -> UnsupportedBackendError:
    where = f"{class_name(model)}.{use.module}" if use.module else class_name(model)
    way_out = "" if use.verdict is Verdict.NOT_TRAINABLE else ', or policy="full"'
    return UnsupportedBackendError(
        f"{policy}: backend {use.backend!r} at {where} {reason}. "
        f'Use transformer.set_attention_backend("native"){way_out}; `fastac backends` lists what can be saved here.'
    )


def ignored_backends(model: torch.nn.Module, blocks: Iterable[str]) -> list[str]:
    """A sentence for each attention backend that is set but has no effect on some attention of the model's blocks."""
    counts: dict[tuple[str, str], int] = {}
    names = tuple(blocks)
    for use in backend_uses(model):
        # Nothing is lost if the setting that is ignored is "native": the module calls the same function by itself.
        if use.ignores not in ("", use.backend) and any(is_inside(use.module, name) for name in names):
            counts[use.ignores, use.processor] = counts.get((use.ignores, use.processor), 0) + 1
    return [
        f"backend {backend!r} has no effect on {count} attention modules: {processor} calls "
        f"scaled_dot_product_attention itself"
        for (backend, processor), count in counts.items()
    ]
