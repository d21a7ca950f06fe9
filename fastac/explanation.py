"""What users read when an attention call was not saved: which one, where, why, and what to do."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fastac import census, opaque, plugins, registry
from fastac.compile import torch_private
from fastac.diagnosis import Look
from fastac.policy import Policy
from fastac.ranks import class_name
from fastac.rows import Verdict

logger = logging.getLogger("fastac")


def explain(function: Any, policy: Policy, look: Look, made: int, expected: int) -> str:
    """The message of a PolicyNotAppliedError for a region that recorded `made` attention calls."""
    where = census.describe(function)
    lines = [f"{policy}: not every attention call at {where} was saved ({made} of {expected} reached a registered op)."]
    for attention in look.missed:
        place = f"{where}.{attention.module}" if attention.module else where
        lines.append(
            f"- {attention.op} in {place} over {attention.keys} keys ran as small ops, which leave no attention output "
            f"to save: {attention.cause}."
        )
    for unknown in sorted(set(look.unknown)):
        lines.append(
            f"- {unknown.namespace}::{unknown.name} looks like an attention forward and has no row. If it is one, add "
            f"one (layout is where its keys are: bshd, bhsd or thd; dropout None if it never draws random numbers):\n"
            f"{unknown.suggested_row()}"
        )
    lines += [f"- {reason}" for reason in sorted(set(look.elsewhere))]
    for hidden in look.hidden:
        lines.append(_explain_hidden(hidden))
    for name in sorted(set(look.silent)):
        lines.append(
            f"- {where}.{name} ran, and no attention call was seen: its kernel is called past the dispatcher "
            f"(from an autograd.Function, by pybind or ctypes). If it stands in a Function, once before training: "
            f'fastac.make_visible(TheFunction, layout="bshd"). Else make it an op with a row: docs/adding_a_backend.md.'
        )
    for use in registry.backend_uses(function) if isinstance(function, torch.nn.Module) else ():
        if use.verdict not in (Verdict.SAVABLE, Verdict.OPAQUE):
            lines.append(
                f"- {where}.{use.module} is set to backend {use.backend!r} ({use.verdict.value}): {use.reason}."
            )
    if len(lines) == 1:
        higher_order = [op.name for op in look.ops if isinstance(op.op, torch._ops.HigherOrderOperator)]
        if made < len(look.ops) and higher_order:
            lines.append(
                f"- {higher_order[0]} is compiled into code of its own here, in which no call is left to save. "
                f"Compile it by fastac.compile_attention in the place of torch.compile, or the blocks by "
                f"fastac.compile(model): both leave it a call."
            )
        elif made < len(look.ops):
            lines.append(
                "- Run eagerly the block makes every call. Compiled code called a kernel past the dispatcher "
                "(inductor's cpp_wrapper does), or the block takes another path from call to call."
            )
        else:
            lines.append(
                "- This block made more attention calls on equal inputs before. Its attention was replaced by a kernel "
                "that fastac can not see, or it takes another path from call to call."
            )
    lines += [f"- plugin {plugin} is left out, and with it its rows: {why}" for plugin, why in plugins.broken().items()]
    ran = ", ".join(dict.fromkeys(op.name for op in look.ops)) or "none"
    lines.append(f'Registered ops that did run: {ran}. Mend the cause, or use policy="full" for this block.')
    return "\n".join(lines)


def _explain_hidden(function: type) -> str:
    name = f"{function.__module__}.{function.__qualname__}, an autograd.Function"
    if opaque.is_visible(function):
        return (
            f"- {name} that was made visible, was called where its op could not be: with tensors of a subclass (such "
            f"as DTensor), or in another thread."
        )
    return (
        f"- {name}, looks like an attention, and no op shows its kernel. Once, before training: "
        f'fastac.make_visible({function.__qualname__}, layout="bshd") (bshd, bhsd or thd: where its keys are). If it '
        f"is none, that does no harm: its output is saved, too."
    )


def warn_of_cut_off(parameters: Sequence[str], where: str) -> None:
    """Tell of attention parameters that get no gradient. It may be meant so: a projection that is not used here."""
    if parameters:
        logger.warning(
            "%s: %s require grad and have no part in its output, so that they get no gradient. An attention kernel "
            "without a backward does that (SageAttention); if it is meant so, requires_grad_(False) says it.",
            where,
            ", ".join(parameters[:6]) + (f" and {len(parameters) - 6} more" if len(parameters) > 6 else ""),
        )


_given_up: weakref.WeakSet[type] = weakref.WeakSet()


def warn_of_compiler(function: Any) -> None:
    """Tell, once for a class of blocks, that their checkpoint stands in compiled code and was left out of it."""
    kind = type(census.block_of(function))
    if torch_private.was_given_up() and kind not in _given_up:
        _given_up.add(kind)
        logger.warning(
            "%s: runs eagerly, though torch.compile was applied to what calls it: a graph break inside a checkpoint "
            "makes the compiler leave out all of it. Attention is saved. fastac.compile(model), without torch.compile "
            "of the whole model, keeps blocks compiled that break.",
            class_name(kind),
        )


@functools.cache
def warn_of_outer_checkpoint(where: str) -> None:
    """Log, once for a block, that it is inside somebody else's checkpoint."""
    logger.warning(
        "%s: its forward runs again in backward, inside a checkpoint that is not fastac's: there attention runs again, "
        "too. Leave that checkpoint out, or use fastac.checkpoint for it.",
        where,
    )
