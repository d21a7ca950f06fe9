"""checkpoint(function, *args, policy=...): what diffusers calls per block, and what other models call themselves.

The way of one call: `checkpoint` opens a `Region`; torch asks it for two contexts; the forward runs under the first,
the recompute under the second; back from the forward, `Region.check` compares what was recorded with the census.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import census, diagnosis, interception, torch_internals
from fastac.census import Census, Observer
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import BlockPolicies, Policy, resolve
from fastac.selective import Contexts, SelectiveRecord, traced_contexts
from fastac.tape import Record, Replay, Tape
from fastac.torch_internals import runs_eagerly

logger = logging.getLogger("fastac")

ENGINES = ("tape", "sac")


@runs_eagerly
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: str | Policy | BlockPolicies = "attn_only",
    engine: str = "tape",
    use_reentrant: bool | None = False,
    context_fn: object = None,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Checkpoint a function, except for what the policy saves; in the place of torch.utils.checkpoint.checkpoint.

    function: a block or any callable; called as function(*args, **kwargs), again in backward.
    engine: "tape", or "sac" for torch's own selective checkpointing.
    kwargs: `preserve_rng_state`, `determinism_check` and `early_stop` go to torch, all others to the function.
    Raises PolicyNotAppliedError when an attention call that the policy saves could not be saved, FastacError for
    what can not be honoured: reentrant checkpointing, a context_fn of the caller, debug mode.
    """
    if isinstance(policy, BlockPolicies):
        policy = policy.of(function) or _refuse_strange_block(function)
    else:
        policy = resolve(policy)
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if policy.saves_nothing:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(contexts_while_tracing, policy)
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if use_reentrant or context_fn is not None or engine not in ENGINES:
        _refuse_options(use_reentrant, context_fn, engine)
    if torch_internals.in_other_trace():
        _warn_of_trace()
        return function(*args, **kwargs)
    if policy.saves_nothing:
        return torch_checkpoint(function, *args, use_reentrant=False, debug=debug, **kwargs)
    if debug or torch_internals.checkpoint_debug_enabled():
        raise FastacError(
            f"checkpoint(policy={str(policy)!r}): torch's checkpoint debug mode replaces the contexts that do the "
            f'saving. Switch it off, or debug with policy="full".'
        )
    region = Region(function, args, kwargs, policy, engine)
    outputs = torch_checkpoint(function, *args, use_reentrant=False, context_fn=region.contexts, **kwargs)
    region.check()
    return outputs


def _refuse_strange_block(function: Any) -> NoReturn:
    refuse_wrapped(function)
    raise FastacError(
        f"{census.describe(function)} is called under policies per block, and is no block that fastac.enable saw: "
        f"it was exchanged since. Call fastac.enable again."
    )


def _refuse_options(use_reentrant: bool | None, context_fn: object, engine: str) -> None:
    if use_reentrant:
        raise FastacError(
            "checkpoint(use_reentrant=True): reentrant checkpointing has no place to save anything. "
            "Use use_reentrant=False, which is the default here."
        )
    if context_fn is not None:
        raise FastacError(
            "checkpoint(context_fn=...): fastac passes its own, which does the saving. Give it a policy instead."
        )
    raise FastacError(f"checkpoint(engine={engine!r}): there are {', '.join(ENGINES)}")


@functools.cache
def _warn_of_trace() -> None:
    logger.warning("a trace that is neither dynamo nor AOT: checkpointed regions are traced as they are")


def contexts_while_tracing(policy: Policy) -> Contexts:
    """The contexts of a region that dynamo put into a graph; called by AOT, or by eager torch after a graph break."""
    if torch_internals.in_proxy_trace():
        return traced_contexts(policy)
    tape = Tape()
    return Record(tape, policy), Replay(tape)


class Region:
    """One call of a block under checkpointing. It ends with the forward; the tape lives on in torch's recompute."""

    __slots__ = ("_known", "args", "block", "engine", "function", "key", "kwargs", "observer", "policy", "record")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, engine: str
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.policy = policy
        self.engine = engine
        self.record: Record | SelectiveRecord | None = None
        self.observer: Observer | None = None
        self.block = census.block_record(function)
        self.key = (policy, census.signature((args, kwargs)))
        self._known: Census | None = None

    @runs_eagerly
    def contexts(self) -> Contexts:
        """torch's context_fn: what the forward and the recompute run under."""
        if torch_internals.in_proxy_trace() or any(map(torch_internals.is_fake, self.args)):
            return traced_contexts(self.policy)
        self._known = self.block.censuses.get(self.key) if self.block is not None else None
        if self._known is None:
            self._known = census.known(self.function).get(self.key)
        if self._known is None:
            interception.install()
            refuse_wrapped(self.function)
            if not self._compiled:
                self.observer = Observer(self.function, self.args, self.policy)
        if self.engine == "sac":
            if self._known is None and self._compiled:
                raise FastacError(
                    f'engine="sac" at {census.describe(self.function)}: torch\'s selective checkpointing around '
                    f"compiled code may hand out buffers that the code reuses. Use the default engine."
                )
            self.record = selective = SelectiveRecord(self.policy, self.observer)
            return selective, selective.replay
        tape = Tape()
        self.record = record = Record(tape, self.policy, self.observer)
        return record, Replay(tape)

    @property
    def _compiled(self) -> bool:
        return torch_internals.in_compiled_caller() or is_compiled(self.function)

    @runs_eagerly
    def check(self) -> None:
        """Raise PolicyNotAppliedError when an attention call of the forward that the policy saves was not saved."""
        record = self.record
        if record is None or not record.entered:
            return  # gradients are off, here or around a reentrant checkpoint: there is nothing to save
        known = self._known
        if known is None or record.missed or known.ops != record.calls:
            self._settle(record)
        else:
            self._remember(known)

    def _settle(self, record: Record | SelectiveRecord) -> None:
        mine = record.census() if isinstance(record, SelectiveRecord) else Census.of_tape(record)
        observer = self.observer
        if observer is not None:
            if observer.late:
                logger.info("%s: %s was loaded by this forward", census.describe(self.function), observer.late[0])
                return  # the next region is recorded, and taken as the first of its kind
            if record.missed or observer.decomposed or observer.unknown or observer.elsewhere:
                self._raise(mine, None, observer)
        elif self._known is None or record.missed or len(mine.ops) < len(self._known.ops):
            # Compiled, or fewer calls than this class made before: look again, eagerly.
            look = diagnosis.look_again(self.function, self.args, self.kwargs, self.policy)
            before = self.block.censuses.get(self.key) if self.block is not None else None
            expected = max(len(look.ops), len(before.ops) if before is not None else 0)
            if record.missed or look.missed or look.unknown or look.elsewhere or len(mine.ops) < expected:
                self._raise(mine, look, None, expected)
        if census.known(self.function).setdefault(self.key, mine) is mine:
            ops = ", ".join(dict.fromkeys(call.op for call in mine.calls)) or "none"
            saved = sum(call.saved for call in mine.calls)
            where = census.describe(self.function)
            logger.info("%s: %d attention calls, %d saved by %s (%s)", where, len(mine.calls), saved, self.policy, ops)
        self._remember(mine)

    def _remember(self, mine: Census) -> None:
        for listener in census.listeners:
            listener(mine)
        block = self.block
        if block is not None and block.latest is not mine:
            block.latest = block.censuses[self.key] = mine

    def _raise(self, mine: Census, look: diagnosis.Look | None, observer: Observer | None, expected: int = 0) -> None:
        look = look or diagnosis.look_again(self.function, self.args, self.kwargs, self.policy)
        if observer is not None:
            look.elsewhere = look.elsewhere or observer.elsewhere
        made = len(mine.ops)
        expected = max(expected, made + len(look.elsewhere), len(look.ops) + len(look.missed) + len(look.unknown))
        raise PolicyNotAppliedError(diagnosis.explain(self.function, self.policy, look, made, expected))


def is_compiled(function: Any) -> bool:
    """Whether torch.compile was applied to a function, a block, or a module inside it."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    block = getattr(function, "__self__", function)
    if not isinstance(block, torch.nn.Module):
        return False
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in block.modules()
    )


def refuse_wrapped(function: Any) -> None:
    """Raise FastacError when something inside is checkpointed already: attention would run twice and be kept."""
    block = getattr(function, "__self__", function)
    if not isinstance(block, torch.nn.Module):
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for name, module in block.named_modules():
        if isinstance(module, CheckpointWrapper):
            where = ".".join(filter(None, (census.describe(function), name)))
            raise FastacError(
                f"{where} is wrapped in torch's CheckpointWrapper (accelerate's FSDP activation_checkpointing does "
                f"that), so it would be checkpointed twice. Switch the wrapper off, or do not use fastac for it."
            )
