"""What every step is held to: a model saves something, and attention that was to be saved does not run again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastac.backends import opaque
from fastac.diagnosis.recognition import names_attention_kernel
from fastac.engine import kinds, torch_private
from fastac.engine.blocks import describe, known_state
from fastac.engine.process import thread
from fastac.errors import PolicyNotAppliedError, class_name
from fastac.policy import Policy
from fastac.registry import BoundOp

MOST_PROBLEMS = 3
"""So many problems are named in one message."""


def warn_of_fewer(function: Any) -> None:
    """Warn, once, that compiled code makes fewer attention calls than before."""
    why = "layer drop, a branch, or attention that fastac cannot see"
    said = f"{describe(function)}: compiled, and fewer attention calls than before: {why} (fastac.verify tells)"
    kinds.warn_once(function, "fewer", said)


def judge_model(model: Any, policy: str, blocks: Mapping[Any, Policy]) -> bool:
    """Whether a model's forward, which has ended, saved something.

    Args:
        policy: the policy in words, for messages.
        blocks: each block, with its policy.

    Raises:
        PolicyNotAppliedError: regions ran that backward runs again, and nothing was saved in any.
    """
    states = [state for state in map(known_state, blocks) if state is not None]
    ended = [state.latest for state in states if state.latest is not None]
    results = [result for result in ended if result.has_graph]
    for state in () if results else states:
        state.latest = None  # a forward that is frozen as a whole says nothing of the next one, whose blocks may train
    calls = [call for result in results for call in result.calls]
    ran = ", ".join(dict.fromkeys(f"{call.op} over {call.keys} keys" for call in calls))
    products = any(result.products for result in results)
    saved = products or any(call.saved for call in calls)
    saved = saved or any(state.communication is not None and state.communication.saved for state in states)
    if not ran and any(block_policy.saves(sys.maxsize) for block_policy in blocks.values()):
        # The policy saves attention of any length, and none was seen. A saved Linear output must not hide that. In
        # frozen blocks no attention runs again.
        saved = any(result.attention_calls for result in ended)
    if results and not saved and not any(result.compiled for result in results):
        unknown = [*dict.fromkeys(name for result in results for name in result.unknown)]
        if unknown and not (ran or products):
            raise PolicyNotAppliedError(nothing_known(class_name(model), policy, unknown))
        raise PolicyNotAppliedError(
            f"{policy}: {'nothing' if ran else 'no attention'} is saved in any block of {class_name(model)}.\n"
            f"Attention in its blocks: {ran or 'none seen (linear, in small ops, no row, in no checkpointed part)'}.\n"
            f"{'Use a smaller min_kv' if ran else 'Give its kernel a row (docs/adding_a_backend.md)'}, or use "
            f'policy="full" if that is meant.'
        )
    return saved


def ran_again(op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyNotAppliedError for attention that the backward of a region runs again, outside a recompute."""
    # Only in a backward that recomputed a region in this thread: autograd numbers nodes by thread.
    if not op.is_attention or thread.backward != torch_private.running_backward() or torch_private.is_abstract(args):
        return
    node = torch_private.running_node()
    # The backward of some attentions runs their forward again, with or without checkpointing.
    if node is None or may_run_again(node):
        return
    number, keys = torch_private.sequence_number(node), op.keys(args, kwargs)
    for first, last, policy in thread.replayed:
        # The region's forward made the node that is running, so this attention belongs to a checkpoint inside it.
        if first < number <= last and policy.saves(keys):
            raise PolicyNotAppliedError(
                f"{policy}: {op.name} over {keys} keys ran again in backward, called by {node.name()}: "
                f"{_why_again(node)}"
            )


def _why_again(node: Any) -> str:
    """Why a node of a region runs attention again, and what to do."""
    if node.name() == torch_private.COMPILED_NODE:
        return (
            f"the compiler did not keep it. A torch._functorch.config.activation_memory_budget below 1 as it compiles "
            f"does that (now it is {torch_private.memory_budget():g}), or a partitioner of your own.\nSet it to 1, or "
            f"remove that, call torch._dynamo.reset(), and train once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
        )
    return (
        "a checkpoint of the block's own (reentrant, or a library's) is around it.\nRemove that checkpoint, or use "
        "fastac.checkpoint there. If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
    )


def may_run_again(node: Any) -> bool:
    """Whether attention that runs during this node's backward is expected.

    If not, a checkpoint that is not fastac's is running it again. An attention's own backward may run its forward again
    (diffusers' context parallelism does), with or without checkpointing. So may Functions of torch: custom ops,
    torch.cond. A graph of torch.compile may not: if it does, the compiler did not keep what it should.
    """
    if node.name() == torch_private.COMPILED_NODE:
        return False
    function = torch_private.function_of(node)
    if function is None or function.__module__.startswith("torch._") or opaque.is_visible(function):
        return True
    name = function.__name__
    return names_attention_kernel(name) and "checkpoint" not in name.lower()


def ran_past_patch(policy: Policy, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PolicyNotAppliedError for attention under a checkpoint that `patch_checkpoint` did not replace."""
    node = torch_private.running_node()
    # A graph that was compiled before the patch holds torch's checkpoint, and looks up no name.
    in_graph = node is not None and node.name() == torch_private.COMPILED_NODE
    again = node is not None and not may_run_again(node)
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


def nothing_known(where: str, policy: Policy | str, unknown: Sequence[str]) -> str:
    """A sentence on regions without attention, in which ops and autograd.Functions run that fastac does not know."""
    more = f" and {len(unknown) - MOST_PROBLEMS} more" if len(unknown) > MOST_PROBLEMS else ""
    return (
        f"{where}: {policy} saves nothing in it: no attention was seen, and {', '.join(unknown[:MOST_PROBLEMS])}{more} "
        f"run again, which fastac does not know.\nIf one of them is attention: "
        f"fastac.register(fastac.AttentionOp(...)) for an op, fastac.make_visible(TheFunction, layout=...) for an "
        f'autograd.Function (docs/adding_a_backend.md). If none is: policy="full" does the same here.'
    )
