"""checkpoint(function, *args, policy=...): what diffusers calls per block, and what other models call themselves.

The way of one call: `checkpoint` opens a `Region`; torch asks it for two contexts; the forward runs under the first,
the recompute under the second; back from the forward, `Region.check` compares what was recorded with the census.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import annotation, census, checkpoint_wrappers, torch_internals, traced_regions
from fastac.policy import BlockPolicies, Policy, resolve
from fastac.preflight import refuse_debug, refuse_options, refuse_strange_block
from fastac.regions import Region

ENGINES = ("tape", "sac")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: str | Policy | BlockPolicies = "attn_only",
    engine: str = "tape",
    use_reentrant: bool | None = False,
    context_fn: object = None,
    debug: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Checkpoint a function, except for what the policy saves; in the place of torch.utils.checkpoint.checkpoint.

    function: a block or any callable; called as function(*args, **kwargs), again in backward.
    engine: "tape", or "sac" for torch's own selective checkpointing.
    preserve_rng_state, determinism_check, early_stop: as in torch's function, which gets them.
    Raises PolicyNotAppliedError when an attention call that the policy saves could not be saved, FastacError for
    what can not be honoured: reentrant checkpointing, a context_fn of the caller, debug mode.
    """
    if checkpoint_wrappers.inside(function) is not function:
        if checkpoint_wrappers.calls_fastac(function):
            return function(*args, **kwargs)
        own = functools.partial(checkpoint, policy=policy, engine=engine)
        where = census.describe(checkpoint_wrappers.inside(function))
        with checkpoint_wrappers.taken_over(function, own, where) as wrapped:
            if wrapped:
                return function(*args, **kwargs)  # the wrapper calls us, on what is inside it
    if isinstance(policy, BlockPolicies):
        policy = policy.of(function) or refuse_strange_block(function)
    else:
        policy = resolve(policy)
    if use_reentrant or context_fn is not None or engine not in ENGINES:
        refuse_options(use_reentrant, context_fn, engine, ENGINES)
    if debug and not policy.saves_nothing:
        refuse_debug(policy)
    full = functools.partial(
        torch_checkpoint,
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
        **kwargs,
    )
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if policy.saves_nothing:
            return full(debug=debug) if debug else full()
        traced_regions.prepare()
        return full(context_fn=functools.partial(traced_regions.contexts_while_tracing, policy))
    if torch_internals.in_other_trace():
        return annotation.run_annotated(function, args, kwargs, policy)
    if policy.saves_nothing:
        return full(debug=debug)
    if torch_internals.checkpoint_debug_enabled():
        refuse_debug(policy)
    region = Region(function, args, kwargs, policy, engine, preserve_rng_state)
    outputs = full(context_fn=region.contexts)
    region.check(outputs)
    return outputs
