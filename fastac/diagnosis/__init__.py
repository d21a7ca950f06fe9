"""What was not saved, in words: `judge` is asked for the first region of a kind, `judge_model` until something is.

`observer` watched the region, `recognition` says what looks like attention, `autograd_graph` reads what the region
left behind, `eager_look` runs compiled code once without its compiler.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastac.compile import graphs
from fastac.diagnosis.autograd_graph import (
    hidden_functions,
    may_run_again,
    nodes_between,
    parameters_cut_off,
    ran_compiled_code,
)
from fastac.diagnosis.eager_look import EagerLook, look
from fastac.diagnosis.observer import Observer
from fastac.engine import opaque, releases, torch_private
from fastac.engine.blocks import block_of, describe, is_compiled, known_record
from fastac.engine.calls import RegionResult
from fastac.engine.tape import Tape, engine, thread
from fastac.errors import PolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import AttentionOp, BoundOp

logger = logging.getLogger("fastac")

MOST_PROBLEMS = 3
"""That one message names."""


def judge(
    function: Any, args: tuple[Any, ...], kwargs: Any, outputs: Any, tape: Tape, observer: Observer | None
) -> RegionResult:
    """What the first region of a kind did.

    Args:
        function: what is checkpointed, called with args and kwargs; outputs: what it returned.
        tape: what its forward kept.
        observer: what watched it; None for compiled code, which nobody can watch and which is run once more, eagerly.

    Raises:
        PolicyNotAppliedError: an attention that the policy saves was not saved. It names module, op and cause.
    """
    policy = tape.policy
    nodes = nodes_between(outputs, (args, kwargs))
    graphs.watch(nodes, policy)
    if ran_again not in engine.listeners:
        engine.listeners.append(ran_again)
    hidden = hidden_functions(nodes, tape.owners or (), policy)
    where = describe(function)
    problems = [] if observer is None else _problems_seen(observer, where)
    compiled = is_compiled(function) or ran_compiled_code(nodes) or _called_compiled(tape, observer)
    if compiled:
        seen = look(function, args, kwargs, policy)
        observer = seen.observer
        hidden += seen.hidden
        problems += _problems_seen(observer, where) + _missing(seen, tape, where)
    problems += [_hidden(one) for one in dict.fromkeys(hidden)]
    problems += [
        f"{op.name} drew random numbers in a call in which, by its row (dropout={op.row.dropout!r}), it draws none: "
        f'what draws after it would be wrong. Name the argument that decides in the row, or dropout="always"'
        for op in tape.denied
        if isinstance(op.row, AttentionOp)
    ]
    if problems:
        raise not_applied(function, policy, list(dict.fromkeys(problems)), len(tape.made))
    _warn_of_cut_off(function, nodes)
    assert observer is not None  # of compiled code, it is that of the eager look
    result = tape.result(compiled, observer.writing)
    return dataclasses.replace(result, flops=observer.flops, saved_flops=observer.saved_flops)


def judge_model(model: Any, policy: str, blocks: Mapping[Any, Policy]) -> bool:
    """Whether something was saved in a model whose forward has ended, and so is from now on.

    Args:
        policy: for messages.
        blocks: with the policy of each.

    Raises:
        PolicyNotAppliedError: regions ran, and nothing was saved in any.
    """
    records = [record for record in map(known_record, blocks) if record is not None]
    results = [record.latest for record in records if record.latest is not None]
    ran = ", ".join(dict.fromkeys(f"{call.op} over {call.keys} keys" for one in results for call in one.calls))
    saved = any(record.communication is not None and record.communication.saved for record in records)
    saved = saved or any(one.products or any(call.saved for call in one.calls) for one in results)
    if not ran and any(one.saves(sys.maxsize) for one in blocks.values()):
        saved = False  # attention was to be saved, and none was seen
    if results and not saved and not any(one.compiled for one in results):
        raise PolicyNotAppliedError(
            f"{policy}: {'nothing' if ran else 'no attention'} is saved in any block of {class_name(model)}.\n"
            f"Attention in its blocks: "
            f"{ran or 'none seen (it is linear, written out in small ops, or a kernel without a row)'}.\n"
            f"{'Use a smaller min_kv' if ran else 'Give its kernel a row: docs/adding_a_backend.md'}, or use "
            f'policy="full" if that is meant.'
        )
    return saved


def ran_again(op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An attention kernel is about to run where no region is open: not in the backward of one that was to save it."""
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
                f"the block's own (reentrant, or a library's) is around it.\nLeave that one out, or use "
                f"fastac.checkpoint there. If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
            )


def ran_past_patch(policy: Policy, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The same while `patch_checkpoint` is on: not under a checkpoint that it did not replace, forward or backward."""
    node = torch_private.running_node()
    in_graph = node is not None and node.name() == torch_private.COMPILED_NODE
    again = in_graph or (node is not None and not may_run_again(node))
    if not (again or torch_private.innermost_checkpoint()):
        return
    if policy.saves(keys := op.keys(args, kwargs)):
        seen = f"in the backward of {node.name()}" if again else "under torch's own checkpoint"
        graph = "is in a graph, as torch.compile makes an operator of what is called by this name, or " * in_graph
        raise PolicyNotAppliedError(
            f"patch_checkpoint({str(policy)!r}): {op.name} over {keys} keys ran {seen}.\n"
            f"That checkpoint {graph}was taken before the name was patched (a functools.partial, a model that was "
            f"switched on or compiled), or is reentrant, a library's own, or fastac's of policy \"full\".\n"
            f"Call patch_checkpoint before it is taken and switch to use_reentrant=False, or switch that "
            f"checkpointing off and use fastac.enable(model, blocks=...), or fastac.compile(model, blocks=...).\n"
            f"If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
        )


def not_applied(function: Any, policy: Policy, problems: Sequence[str], made: int) -> PolicyNotAppliedError:
    """The error for a region some of whose attention was not saved."""
    listed = [f"- {problem}." for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        listed[-1] += f" And {len(problems) - MOST_PROBLEMS} more."
    first = f"{policy}: not every attention call at {describe(function)} was saved ({made} reached a known op)."
    way_out = 'Mend the cause, or use policy="full" for this block.'
    if torch_private.in_forward_mode():
        way_out = 'Run torch.func.jvp under torch.no_grad(), or without checkpointing (fastac.disable, policy "none").'
    return PolicyNotAppliedError("\n".join([first, *listed, way_out]))


def small_ops(where: str, keys: int, cause: str = "") -> str:
    """What is said of an attention that ran as small ops."""
    cause = cause or "no fused kernel took it (math kernel forced, dropout, head dims, strides, mask)"
    return f"{where}: an attention over {keys} keys ran as small ops, with no output to save: {cause}"


def _problems_seen(observer: Observer, where: str) -> list[str]:
    def place(module: str) -> str:
        return f"{where}.{module}" if module else where

    problems = [small_ops(place(one.module), one.keys, one.cause) for one in observer.small]
    for unknown in dict.fromkeys(observer.unknown):
        problems.append(
            f"{unknown.namespace}::{unknown.name} looks like an attention forward and has no row. If it is one "
            f"(layout: where its keys are, bshd, bhsd or thd): {unknown.suggested_row()}"
        )
    problems += observer.elsewhere
    for name in observer.passed_by():
        problems.append(f"{name} was called, and not through fastac: another package took its BackendSelect key since")
    return problems or [
        f"{place(name)}: ran, and no attention call was seen: its kernel is called past the dispatcher. From an "
        f'autograd.Function: fastac.make_visible(TheFunction, layout="bshd"). Else: docs/adding_a_backend.md'
        for name in observer.silent
    ]


def _called_compiled(tape: Tape, observer: Observer | None) -> bool:
    """Whether it ran compiled code, also such as the graph does not show; eager flex_attention compiles itself."""
    own = sum(isinstance(op.op, torch_private.HigherOrderOperator) for op, _ in tape.made)
    return observer is not None and observer.compiled_calls.count > own


def _missing(seen: EagerLook, tape: Tape, where: str) -> list[str]:
    """Calls that the eager run made and the compiled one did not."""
    # By backend: compiled flex_attention is an op of its own.
    made = collections.Counter(op.backend for op, _ in tape.made)
    problems = []
    for op in seen.made:
        made[op.backend] -= 1
        if made[op.backend] >= 0:
            continue
        if op.is_opaque:  # what make_visible made visible is so in eager mode only
            logger.warning("%s: %s runs compiled here, where it cannot be saved: it is recomputed", where, op.name)
        elif isinstance(op.op, torch_private.HigherOrderOperator):
            way_out = "use fastac.compile_attention in the place of torch.compile, or fastac.compile(model)"
            if not releases.has(releases.FLEX):
                way_out = f"saving it there needs torch {releases.FIRST_TORCH[releases.FLEX]}; leave it uncompiled"
            problems.append(f"{op.name} is compiled into code of its own, in which no call is left to save: {way_out}")
        else:
            problems.append(
                f"{op.name} is called in eager mode and not by the compiled code: past the dispatcher "
                f"(inductor's cpp_wrapper does that), or the block takes another path from call to call"
            )
    return problems


def _hidden(function: type) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if opaque.is_visible(function):
        return f"{name}, made visible, was called with a tensor subclass (such as DTensor) or in another thread"
    return (
        f"{name}, an autograd.Function, looks like an attention, and no op shows its kernel. Once, before training: "
        f'fastac.make_visible({function.__qualname__}, layout="bshd") (bshd, bhsd or thd: where its keys are)'
    )


def _warn_of_cut_off(function: Any, nodes: Sequence[Any]) -> None:
    """Warn of attention parameters that get no gradient. It may be meant so: a projection that is not used here."""
    parameters = parameters_cut_off(block_of(function), nodes)
    if parameters:
        logger.warning(
            "%s: %s require grad and have no part in its output, so that they get no gradient. An attention kernel "
            "without a backward does that (SageAttention); if it is meant so, requires_grad_(False) says it.",
            describe(function),
            ", ".join(parameters[:6]) + (f" and {len(parameters) - 6} more" if len(parameters) > 6 else ""),
        )
