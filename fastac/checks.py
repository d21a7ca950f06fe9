"""The promise, tried on a tiny model of every class of the catalogue: what `fastac check --all` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastac import hook, models, registry, verification
from fastac.comparison import run_step
from fastac.errors import FastacError
from fastac.models import ModelRow
from fastac.policy import resolve

KEPT, REFUSED, NOT_HERE, FAILED = "kept", "refused", "does not train here", "failed"

BROKEN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError)
"""What a model raises that can not be built or run here."""

AS_SET, SDPA, FLEX = "as set", "always SDPA", "always flex"


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `fastac.verify` found on the tiny model of one row.

    attention: kernels in a forward. in_blocks: those of them inside checkpointed blocks, which full checkpointing runs
    again in backward. again: those that the policy ran again. compared: outputs and gradients, all equal where the
    verdict is "kept". saved_bytes: of the tiny model. backend: which attention backend its blocks use. linear: modules
    of linear attention in its blocks, which are recomputed. problem: why it was refused, or what failed.
    """

    name: str
    containers: tuple[str, ...]
    blocks: int
    attention: int = 0
    in_blocks: int = 0
    saved: int = 0
    again: int = 0
    saved_bytes: int = 0
    compared: int = 0
    backend: str = AS_SET
    linear: int = 0
    verdict: str = KEPT
    problem: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing was found wrong: the promise is kept, or refused loudly, or can not be tried here."""
        return self.verdict != FAILED

    @property
    def remark(self) -> str:
        """What there is to say about it, in a few words."""
        outside = self.attention - self.in_blocks
        found = ((self.linear, "linear, recomputed"), (outside, "outside the blocks"))
        return self.problem or "; ".join(f"{count} {what}" for count, what in found if count)


def check(
    row: ModelRow,
    policy: str = "attn_only",
    engine: str = "tape",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    backend: str | None = None,
) -> Checked:
    """Verify a policy on the tiny model of one row; what goes wrong becomes its verdict, not an error.

    Raises FastacError for a device or backend that can not be used here.
    """
    if not models.is_available(row):
        problem = f"this diffusers has no {row.class_name}"
        return Checked(name=row.name, containers=row.containers, blocks=0, verdict=NOT_HERE, problem=problem)
    try:
        model, inputs = tiny(row, dtype, device, backend)
    except FastacError:
        raise
    except BROKEN as error:
        return Checked(row.name, row.containers, blocks=0, verdict=FAILED, problem=f"it can not be built: {error}")
    containers = hook.containers_of(model)
    checked = Checked(
        name=row.name,
        containers=tuple(container.name for container in containers),
        blocks=sum(len(container.blocks) for container in containers),
        backend=_backend_of(row, model),
    )
    try:
        run_step(model, model, (), inputs)
    except BROKEN as error:  # without fastac: whatever the model raises is its own
        problem = "flex_attention has no backward on a CPU" if row.flex and device == "cpu" else _first_line(error)
        return dataclasses.replace(checked, verdict=NOT_HERE, problem=problem)
    try:
        hook.enable(model, policy, engine=engine)
    except FastacError as error:
        return dataclasses.replace(checked, verdict=REFUSED, problem=_first_line(error))
    try:
        found = verification.verify(model, **inputs, policy=policy, engine=engine)
    except BROKEN as error:  # FastacError, or what would be a fault of fastac's
        return dataclasses.replace(checked, verdict=FAILED, problem=_first_line(error))
    resolved = resolve(policy)
    again = found.policy_executions[1] - found.reference_executions[1]
    in_blocks = again if resolved.saves_nothing else found.saved + found.recomputed  # full regions are not watched
    short = f"no attention over {resolved.min_kv:,} keys in a tiny model" if resolved.min_kv and not found.saved else ""
    return dataclasses.replace(
        checked,
        problem=short,
        attention=found.policy_executions[0],
        in_blocks=in_blocks,
        saved=found.saved,
        again=found.policy_executions[1],
        saved_bytes=found.saved_bytes,
        compared=found.compared,
    )


def tiny(row: ModelRow, dtype: torch.dtype, device: str, backend: str | None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The tiny model of a row and its inputs; raises FastacError for a device or backend that can not be used here."""
    require_device("check", device)
    model, inputs = models.tiny_model(row, dtype, device)
    if backend is not None:
        set_backend("check", model, backend)
    return model, inputs


def require_device(command: str, device: str) -> None:
    """Raise FastacError for a device that torch can not compute on here."""
    if device == "meta":
        raise FastacError(f"{command} --device meta: nothing is computed there, so nothing can be compared")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without this device says so in either way
        raise FastacError(f"{command} --device {device}: torch can not use it here: {error}") from error


def set_backend(command: str, model: Any, backend: str) -> None:
    """Give a model an attention backend. Raises FastacError where diffusers can not use it here."""
    try:
        model.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        raise FastacError(f"{command} --backend {backend}: diffusers can not use it here: {error}") from error


def _backend_of(row: ModelRow, model: torch.nn.Module) -> str:
    if row.flex:
        return FLEX
    uses = [use for use in registry.backend_uses(model) if not use.linear]
    return SDPA if uses and all(use.ignores for use in uses) else AS_SET


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
