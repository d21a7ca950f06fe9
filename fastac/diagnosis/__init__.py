"""Explains attention that was not saved: `judge` the first region of a kind, `judge_model` a model until it saves.

`observer` watches a region, `recognition` says what looks like attention, `autograd_graph` reads the graph that the
region leaves, `eager_look` runs compiled code once without its compiler, unless ranks communicate in it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch

from fastac.diagnosis.autograd_graph import (
    GENERATED,
    hidden_functions,
    may_run_again,
    parameters_cut_off,
    place_of,
    recorded_nodes,
)
from fastac.diagnosis.eager_look import look
from fastac.diagnosis.observer import Observer
from fastac.diagnosis.recognition import no_attention, suggested_visible
from fastac.diagnosis.unknown import check_rows, unknown_calls
from fastac.engine import kinds, opaque, releases, torch_private
from fastac.engine.blocks import block_of, describe, known_state
from fastac.engine.results import RegionResult
from fastac.engine.tape import Tape, engine, thread
from fastac.errors import PolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import AttentionOp, BoundOp
from fastac.registry.torch_private import name_of, qualified_name

logger = logging.getLogger("fastac")

MOST_PROBLEMS = 3
"""How many of them one message names."""


def judge(
    function: Any,
    args: Any,
    kwargs: Any,
    nodes: Sequence[Any],
    tape: Tape,
    observer: Observer | None,
    calls: int,
    earlier: RegionResult | None,
) -> RegionResult:
    """Return the result of the first region of a kind.

    Args:
        function: the checkpointed function, which was called with args and kwargs.
        nodes: autograd nodes between its inputs and its outputs.
        tape: of its forward.
        observer: of its forward; None for a compiled function, which cannot be observed.
        calls: how often compiled code ran or was compiled. If it did, the function is run once more, eagerly.
        earlier: result of compiled code of this kind with other inputs. It was run again then, and is not now.

    Raises:
        PolicyNotAppliedError: an attention that the policy saves was not saved. It names module, op and cause.
    """
    policy = tape.policy
    if ran_again not in engine.listeners:
        engine.listeners.append(ran_again)
    where = describe(function)
    problems = [] if observer is None else _problems_seen(observer, where)
    # Eager flex_attention compiles itself.
    compiled = calls > sum(op.is_higher_order for op, _ in tape.attention_calls)
    compiled = compiled or observer is None or any(node.name() == torch_private.COMPILED_NODE for node in nodes)
    watched = None if compiled else observer  # the whole of the region
    runs: list[tuple[Sequence[Any], Observer | None, Tape]] = [(nodes, observer, tape)]
    if compiled and earlier is not None:
        if len(tape.attention_calls) < len(earlier.attention_calls):
            warn_of_fewer(function)
    elif compiled and (seen := look(function, args, kwargs, tape)) is not None:
        watched, eager_nodes = seen
        runs.append((eager_nodes, watched, watched.tape))
        problems += _problems_seen(watched, where) + _missing(watched.tape, tape, where)
    elif compiled:
        _say_unseen(function, tape)
    unknown: dict[str, None] = {}
    for seen_nodes, seen_by, seen_on in runs:
        recorded = recorded_nodes(seen_nodes, seen_on.callers or ())
        ops = () if seen_by is None else seen_by.ops
        problems += starmap(_hidden, hidden_functions(seen_nodes, recorded, policy, ops).items())
        unknown |= dict.fromkeys(unknown_calls(where, seen_nodes, recorded, seen_by))
        check_rows(seen_nodes, recorded, seen_on)
    problems += [
        f"{op.name} drew random numbers in a call in which, by its row (dropout={op.row.dropout!r}), it draws none: "
        f'random numbers after it would be wrong. Name the argument that decides in the row, or dropout="always"'
        for op in tape.denied
        if isinstance(op.row, AttentionOp)
    ]
    if problems:
        raise not_applied(function, policy, problems, len(tape.attention_calls))
    if cut_off := parameters_cut_off(block_of(function), nodes):
        logger.warning(
            "%s: %d attention parameters require grad and get no gradient, such as %s: its output does not depend on "
            "them. A kernel without a backward does that (SageAttention). If it is intended: requires_grad_(False).",
            where,
            len(cut_off),
            cut_off[0],
        )
    counted = observer if watched is None else watched
    result = tape.result(compiled, 0 if counted is None else counted.writing)
    result = dataclasses.replace(result, unknown=tuple(unknown))
    if watched is None:
        return result
    return dataclasses.replace(result, flops=watched.flops, saved_flops=watched.saved_flops)


def warn_of_fewer(function: Any) -> None:
    """Warn, once, of compiled code that makes fewer attention calls than it did."""
    why = "layer drop, a branch, or attention that fastac cannot see"
    said = f"{describe(function)}: compiled, and fewer attention calls than before: {why} (fastac.verify tells)"
    kinds.warn_once(function, "fewer", said)


def warn_of_reentrant(function: Any, policy: Policy) -> None:
    """Warn, once, of a region that a reentrant checkpoint opens in its backward: its forward runs for a third time."""
    node = torch_private.running_node()
    checkpoint = None if node is None else torch_private.function_of(node)
    if checkpoint is not None and not torch_private.in_recompute():
        said = (
            f"{describe(function)}: its forward runs three times in a step: {checkpoint.__name__}, a reentrant "
            f"checkpoint, is around this one of policy {str(policy)!r}. Pass use_reentrant=False, or switch one off."
        )
        kinds.warn_once(function, "reentrant", said)


def _say_unseen(function: Any, tape: Tape) -> None:
    """Say that compiled code is not run again: a warning if no attention was seen in it."""
    said = (
        f"{describe(function)}: compiled, with {len(tape.attention_calls)} attention calls. As ranks may communicate "
        f"in it, it is not run again eagerly: attention that compiled code hides is not found (fastac.verify in one "
        f"process tells)"
    )
    if tape.attention_calls:
        logger.info("%s", said)
    else:
        kinds.warn_once(function, "unseen", said)


def judge_model(model: Any, policy: str, blocks: Mapping[Any, Policy]) -> bool:
    """Whether a model's forward, which has ended, saved something.

    Args:
        policy: for messages.
        blocks: with the policy of each.

    Raises:
        PolicyNotAppliedError: regions ran, and nothing was saved in any.
    """
    states = [state for state in map(known_state, blocks) if state is not None]
    results = [state.latest for state in states if state.latest is not None]
    ran = ", ".join(dict.fromkeys(f"{call.op} over {call.keys} keys" for one in results for call in one.calls))
    saved = any(one.products or any(call.saved for call in one.calls) for one in results) or any(
        state.communication is not None and state.communication.saved for state in states
    )
    if not ran and any(one.saves(sys.maxsize) for one in blocks.values()):
        saved = False  # attention was to be saved, and none was seen
    if results and not saved and not any(one.compiled for one in results):
        raise PolicyNotAppliedError(
            f"{policy}: {'nothing' if ran else 'no attention'} is saved in any block of {class_name(model)}.\n"
            f"Attention in its blocks: {ran or 'none seen (linear, in small ops, or a kernel without a row)'}.\n"
            f"Use a smaller min_kv, give its kernel a row (docs/adding_a_backend.md), or use "
            f'policy="full" if that is meant.'
        )
    return saved


def ran_again(op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyNotAppliedError for attention that the backward of a region runs again, outside a recompute."""
    if not op.is_attention or thread.backward != torch_private.running_backward() or torch_private.is_abstract(args):
        return
    node = torch_private.running_node()
    if node is None or may_run_again(node):
        return
    number, keys = torch_private.sequence_number(node), op.keys(args, kwargs)
    for first, last, policy in thread.replayed:
        if first < number <= last and policy.saves(keys):
            raise PolicyNotAppliedError(
                f"{policy}: {op.name} over {keys} keys ran again in backward, called by {node.name()}: a checkpoint of "
                f"the block's own (reentrant, or a library's) is around it.\nRemove that checkpoint, or use "
                f"fastac.checkpoint there. If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
            )


def ran_past_patch(policy: Policy, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyNotAppliedError for attention under a checkpoint that `patch_checkpoint` did not replace."""
    node = torch_private.running_node()
    in_graph = node is not None and node.name() == torch_private.COMPILED_NODE
    again = in_graph or (node is not None and not may_run_again(node))
    if (again or torch_private.innermost_checkpoint()) and policy.saves(keys := op.keys(args, kwargs)):
        seen = f"in the backward of {node.name()}" if again else "under torch's own checkpoint"
        graph = "is in a graph, as torch.compile makes an operator of what is called by this name, or " * in_graph
        raise PolicyNotAppliedError(
            f"patch_checkpoint({str(policy)!r}): {op.name} over {keys} keys ran {seen}.\n"
            f"That checkpoint {graph}was taken before the name was patched (a functools.partial, a model that was "
            f"switched on or compiled), or is reentrant, a library's own, or fastac's of policy \"full\".\n"
            f"Call patch_checkpoint before that and set use_reentrant=False, or switch that checkpointing off and use "
            f"fastac.enable or fastac.compile(model, blocks=...).\n"
            f"If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
        )


def not_applied(function: Any, policy: Policy, problems: Iterable[str], made: int) -> PolicyNotAppliedError:
    """The error for a region some of whose attention was not saved."""
    problems = list(dict.fromkeys(problems))
    listed = [f"- {problem}." for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        listed[-1] += f" And {len(problems) - MOST_PROBLEMS} more."
    first = f"{policy}: not every attention call at {describe(function)} was saved ({made} reached a known op)."
    way_out = 'Fix the cause, or use policy="full" for this block.'
    if torch_private.in_forward_mode():
        way_out = 'Run torch.func.jvp under torch.no_grad(), or without checkpointing (fastac.disable, policy "none").'
    return PolicyNotAppliedError("\n".join([first, *listed, way_out]))


def small_ops(where: str, keys: int, cause: str = "") -> str:
    """A sentence on an attention that ran as small ops."""
    cause = cause or "no fused kernel took it (math kernel forced, dropout, dimensions, strides, mask)"
    return f"{where}: an attention over {keys} keys ran as small ops, with no output to save: {cause}"


def nothing_known(where: str, policy: Policy, unknown: Sequence[str]) -> str:
    """A sentence on a region without attention, in which ops and autograd.Functions run that fastac does not know."""
    more = f" and {len(unknown) - MOST_PROBLEMS} more" if len(unknown) > MOST_PROBLEMS else ""
    return (
        f"{where}: {policy} saves nothing in it: no attention was seen, and {', '.join(unknown[:MOST_PROBLEMS])}{more} "
        f"run again, which fastac does not know.\nIf one of them is attention: "
        f"fastac.register(fastac.AttentionOp(...)) for an op, fastac.make_visible(TheFunction, layout=...) for an "
        f'autograd.Function (docs/adding_a_backend.md). If none is: policy="full" does the same here.'
    )


def _problems_seen(observer: Observer, where: str) -> list[str]:
    problems = [small_ops(f"{where}.{one.module}".rstrip("."), one.keys, one.cause) for one in observer.small]
    problems += [
        f"{qualified_name(op)} looks like an attention forward and has no row. If it is one: {row}. "
        f"If not: {no_attention(*name_of(op).split('::'))}"
        for op, row in observer.unknown.items()
    ]
    problems += observer.elsewhere
    problems += [
        f"{name} was called, and fastac did not get the call: another package took its BackendSelect key since"
        for name in observer.passed_by()
    ]
    return problems or [
        f"{where}.{name}: ran, and no attention call was seen: its kernel is called past the dispatcher. If it is an "
        f"autograd.Function: fastac.make_visible(TheFunction, layout=...). Else: docs/adding_a_backend.md"
        for name in observer.silent
    ]


def _missing(eager: Tape, tape: Tape, where: str) -> list[str]:
    """Sentences on calls that the eager run made and the compiled one did not."""
    # By backend: compiled flex_attention is an op of its own.
    made = collections.Counter(op.backend for op, _ in tape.attention_calls)
    problems = []
    for op, _ in eager.attention_calls:
        made[op.backend] -= 1
        if made[op.backend] >= 0:
            continue
        if op.is_opaque:
            logger.warning("%s: %s is made visible in eager code only: compiled, it is recomputed", where, op.name)
        elif op.is_higher_order:
            problems.append(
                f"{op.name} is compiled into code of its own, which calls no op that can be saved: use "
                f"fastac.compile_attention in the place of torch.compile, or fastac.compile(model); before torch "
                f"{releases.FIRST_TORCH[releases.FLEX]} leave it uncompiled"
            )
        else:
            problems.append(
                f"{op.name} is called in eager mode and not by the compiled code: either it calls the kernel past the "
                f"dispatcher (inductor's cpp_wrapper does), or the block takes another path from call to call"
            )
    return problems


def _hidden(function: type, shapes: Sequence[torch.Size | None]) -> str:
    """A sentence on an autograd.Function that hides an attention. shapes: of its inputs."""
    name = f"{function.__module__}.{function.__qualname__}"
    if opaque.is_visible(function):
        return f"{name}, made visible, was called with a tensor subclass (such as DTensor) or in another thread"
    if function.__name__.startswith(GENERATED):
        namespace, own = place_of(function)
        return (
            f"the op {namespace}::{own} looks like an attention, and was called in another thread: call it in the "
            f"block's own. If it is none: {no_attention(namespace, own)}"
        )
    return (
        f"{name}, an autograd.Function, looks like an attention, and no op shows its kernel. Once, before training: "
        f"{suggested_visible(function, shapes)}. If it is none: {no_attention(function.__module__, function.__name__)}"
    )
