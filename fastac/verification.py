"""Proof on the user's model: the same outputs and gradients as without checkpointing, and attention run once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.table import Table
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import block_forward, hook, interception, models
from fastac.checkpointing import checkpoint
from fastac.comparison import Step, as_found, differences, fresh, run_forward, run_step
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import BlockPolicies, Policy, resolve
from fastac.reporting import decided, readable_bytes, render

REFERENCES = ("none", "full")


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. Executions are of attention kernels, in one step; largest differences are absolute.

    noise: the largest difference between two runs of the reference, above 0 where kernels are not deterministic.
    broken: what differs by more than four times its own noise.
    """

    subject: str
    policy: str
    reference: str
    compared: int
    different: tuple[str, ...]
    largest_difference: float
    noise: float
    broken: tuple[str, ...]
    reference_executions: tuple[int, int]
    policy_executions: tuple[int, int]
    saved: int
    recomputed: int
    saved_bytes: int
    allowed_again: int

    def __str__(self) -> str:
        table = Table(title=f"{self.subject}: {self.policy} against {self.reference}", title_justify="left")
        for heading in ("promise", self.reference, self.policy, "kept"):
            table.add_column(heading)
        equal = f"{self.compared - len(self.different)} of {self.compared} bitwise equal"
        forward, backward = zip(self.reference_executions, self.policy_executions, strict=True)
        table.add_row("outputs and gradients", "", equal, _yes(not self.broken))
        table.add_row("attention runs in forward", str(forward[0]), str(forward[1]), _yes(forward[0] == forward[1]))
        once = self.policy_executions[1] <= self.allowed_again
        table.add_row("attention runs in backward", str(backward[0]), str(backward[1]), _yes(once))
        table.add_row("attention calls saved", "", f"{self.saved} of {self.saved + self.recomputed}", "")
        table.add_row("bytes saved", "", readable_bytes(self.saved_bytes), "")
        return render(table)


def _yes(kept: bool) -> str:
    return "yes" if kept else "no"


def _allowed_again(expected: Step, step: Step, saved: int, policy: Policy | BlockPolicies, reference: str) -> int:
    """How many attention kernels may run in backward: those the policy recomputes, and those of the model's own doing.

    Regions under "full" are plain checkpointing and are not seen: what was not saved may run again.
    """
    own = expected.executions[1] if reference == "none" else 0
    if isinstance(policy, BlockPolicies) or policy.saves_nothing:
        return own + step.executions[0] - saved
    return own + len(step.calls) - saved


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
    """
    if reference not in REFERENCES:
        raise FastacError(f"verify(reference={reference!r}): there are {', '.join(REFERENCES)}")
    hook.check_module(model, "verify")
    inner = models.unwrapped(model)
    subject = type(inner).__name__
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
            result = _verify_block(model, args, kwargs, policy, engine, reference)
        elif per_block:
            if blocks is not None:
                raise FastacError("verify(per_block=True) is for models that are enabled without blocks=...")
            result = _verify_blocks(model, args, kwargs, policy, engine, reference)
        else:
            result = _verify_model(model, args, kwargs, policy, engine, reference, blocks)
    result = dataclasses.replace(result, subject=subject)
    _raise_if_broken(result)
    return result


def _raise_if_broken(result: Verification) -> None:
    if result.broken:
        listed = ", ".join(result.broken[:5]) + (", ..." if len(result.broken) > 5 else "")
        raise FastacError(
            f"verify: {len(result.broken)} of {result.compared} outputs and gradients of {result.subject} under "
            f"{result.policy} differ from {result.reference} checkpointing, by up to {result.largest_difference:.3g} "
            f"({listed}); two runs of the reference differ by {result.noise:.3g}.\n{result}"
        )
    again = result.policy_executions[1] - result.allowed_again
    if again > 0 or result.policy_executions[0] != result.reference_executions[0]:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} under {result.policy} ran {max(again, 0)} attention kernels in backward that "
            f"were to be saved.\n{result}"
        )
    if result.policy == "attn_only" and result.saved == 0 and result.reference_executions[0] > 0:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} runs {result.reference_executions[0]} attention kernels, none of them inside a "
            f"checkpointed block, so {result.policy} saved nothing.\n{result}"
        )


def _verify_model(
    model: torch.nn.Module, args: Any, kwargs: Any, policy: Any, engine: str, reference: str, blocks: Any
) -> Verification:
    inner: Any = models.unwrapped(model)

    def step() -> Step:
        return run_step(model, model, args, kwargs)

    def reference_step() -> Step:
        hook.disable(inner)
        if blocks is not None:
            if reference == "full":
                hook.enable(inner, "full", blocks=blocks)
        elif reference == "full":
            inner.enable_gradient_checkpointing(_full_checkpoint)
        else:
            inner.disable_gradient_checkpointing()
        return step()

    def policy_step() -> Step:
        hook.enable(inner, policy, engine=engine, blocks=blocks)
        found = step()
        if found.calls or not found.graphs:
            return found
        calls = decided(inner, lambda block: -1, found.graphs).values()
        return dataclasses.replace(found, calls=[call for block in calls for call in block], in_graph=True)

    def eager_reference_step() -> Step:
        with torch.compiler.set_stance("force_eager"):
            return reference_step()

    selected = _selected(inner, policy, engine, blocks)
    return _compare(reference_step, policy_step, selected, reference, eager_reference_step)


def _selected(model: torch.nn.Module, policy: Any, engine: str, blocks: Any = None) -> Policy | BlockPolicies:
    hook.enable(model, policy, engine=engine, blocks=blocks)
    setting = hook.setting_of(model)
    if setting is None:
        raise FastacError(f"verify: {type(model).__name__} did not take a gradient checkpointing function")
    return setting.policy


def _verify_block(
    block: torch.nn.Module, args: Any, kwargs: Any, policy: Any, engine: str, reference: str
) -> Verification:
    def reference_step() -> Step:
        return run_step(block, _full_checkpoint if reference == "full" else _plain, (block, *args), kwargs)

    def policy_step() -> Step:
        function = functools.partial(checkpoint, policy=policy, engine=engine)
        return run_step(block, function, (block, *args), kwargs)

    selected = policy[block] if isinstance(policy, BlockPolicies) else resolve(policy)
    return _compare(reference_step, policy_step, selected, reference)


def _verify_blocks(
    model: torch.nn.Module, args: Any, kwargs: Any, policy: Any, engine: str, reference: str
) -> Verification:
    inner: Any = models.unwrapped(model)
    selected = _selected(inner, policy, engine)
    regions: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    hook.disable(inner)
    inner.enable_gradient_checkpointing(functools.partial(_captured, regions))
    run_forward(model, args, kwargs)
    parts = [_verify_block(block, inputs, named, selected, engine, reference) for block, inputs, named in regions]
    if not parts:
        raise FastacError(f"verify(per_block=True): {type(model).__name__} checkpointed no block on these inputs")
    return Verification(
        subject=type(model).__name__,
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


def _compare(
    reference_step: Callable[[], Step],
    policy_step: Callable[[], Step],
    policy: Any,
    reference: str,
    eager_reference_step: Callable[[], Step] | None = None,
) -> Verification:
    """The policy runs twice: the first step, which may compile and takes the census, must be as exact as any other."""
    expected, first, later = reference_step(), policy_step(), policy_step()
    different = differences(expected, first)
    for name, difference in differences(expected, later).items():
        different[name] = max(difference, different.get(name, 0.0))
    noise = differences(expected, reference_step()) if different else {}
    allowed = {name: 4 * size for name, size in noise.items()}
    if different and later.in_graph and eager_reference_step is not None:
        compiling = differences(expected, eager_reference_step())
        allowed = {
            name: max(allowed.get(name, 0.0), 4 * compiling.get(name, 0.0) + expected.rounding(name))
            for name in different
        }
    broken = [name for name, size in different.items() if math.isinf(size) or size > allowed.get(name, 0.0)]
    saved = [call for call in later.calls if call.saved]
    return Verification(
        subject="",
        policy=str(policy),
        reference=reference,
        compared=len(expected.tensors),
        different=tuple(different),
        largest_difference=max(different.values(), default=0.0),
        noise=max(noise.values(), default=0.0),
        broken=tuple(broken),
        reference_executions=expected.executions,
        policy_executions=later.executions,
        saved=len(saved),
        recomputed=len(later.calls) - len(saved),
        saved_bytes=sum(call.saved_bytes for call in saved),
        allowed_again=_allowed_again(expected, later, len(saved), policy, reference),
    )
