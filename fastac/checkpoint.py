"""checkpoint(function, *args, policy=...): one region, from its forward to its recompute.

The way of one call: `checkpoint` opens a `Region`; torch asks it for two contexts; the forward runs under the first, a
`Record`, the recompute under the second, a `Recompute`; back from the forward, `Region.end` compares what was recorded
with what the first region of its kind did. That first one is watched, and judged by `fastac.diagnosis`.
`patch_checkpoint` lets code that calls torch's function by its name come here.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from fastac import diagnosis
from fastac.backends import plugins
from fastac.compile import graphs, tracing
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.diagnosis.observer import Observer
from fastac.engine import interception, linear, opaque, torch_private
from fastac.engine.blocks import (
    MANY,
    BlockRecord,
    block_of,
    describe,
    is_compiled,
    kind_of,
    module_of,
    modules_in,
    record_of,
    signature,
)
from fastac.engine.tape import Hooks, Recompute, Record, RegionResult, Tape, engine
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy, resolve

logger = logging.getLogger("fastac")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _State:
    """What is known in this process of regions of one kind: block class, or code of a function, policy and inputs.

    kinds, warned: by class or code, the first regions and what was warned of. of_one_block: by block (fastac.verify).
    collectors: get the result of every region that ends as it should, while they stand here (fastac.verify).
    traced: regions stand in a graph that dynamo made, where none of them is seen to open.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every kind: the next region of each is its first."""
        self.kinds: weakref.WeakKeyDictionary[Any, dict[Any, RegionResult]] = weakref.WeakKeyDictionary()
        self.warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.of_one_block = False
        self.collectors: list[list[RegionResult]] = []
        self.traced = False


state = _State()


def prepare() -> None:
    """Load plugins, make known kernels visible, and intercept every op with a row that this process has."""
    plugins.load()
    opaque.make_known_visible()
    interception.install()


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    policy: str | Policy = "attn_only",
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Checkpoint a function, except for what the policy saves; in the place of torch.utils.checkpoint.checkpoint.

    Args:
        function: a block or any callable; called as function(*args, **kwargs), and again in backward. Without it, a
            decorator is returned.
        policy: "attn_only", "long_attn_only", "full", "none" or a fastac.Policy.
        preserve_rng_state, determinism_check, early_stop: as in torch's function, which gets them.
        respect_saved_tensors_hooks: True hands what is saved to the saved_tensors_hooks around the call, such as
            torch.autograd.graph.save_on_cpu, as torch 2.14 does under selective checkpointing.
        use_reentrant, context_fn: refused, unless as by default. debug: torch refuses it unless the policy is "full".

    Returns:
        What the function returns.

    Raises:
        PolicyNotAppliedError: an attention call that the policy saves could not be saved.
        FastacError: what cannot be honoured: reentrant checkpointing, a context_fn of the caller.

    Example:
        >>> hidden = fastac.checkpoint(block, hidden, text, policy="attn_only")
    """
    if function is None and not args and not kwargs:
        return functools.partial(
            _decorated,
            policy=policy,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
    if function is None:
        raise FastacError("checkpoint: inputs, or keywords that it does not know, were given without a function")
    if use_reentrant or context_fn is not noop_context_fn:
        raise FastacError(
            f"checkpoint({'use_reentrant=True' if use_reentrant else 'context_fn=...'}): fastac passes a context_fn of "
            f"its own, which does the saving, and reentrant checkpointing has no place for one. Pass "
            f"use_reentrant=False and no context_fn; what is saved is said by policy=..."
        )
    policy = resolve(policy)
    if not policy.checkpoints:
        if not torch.compiler.is_compiling() and engine.thread.scope is None and torch_private.innermost_checkpoint():
            raise PolicyNotAppliedError(
                f"none: {describe(function)} is not to be checkpointed, and runs in a checkpoint that is not fastac's. "
                f"Switch the model's own checkpointing off."
            )
        return function(*args, **kwargs)
    if torch_private.in_export():
        return function(*args, **kwargs)  # what is exported recomputes nothing
    debugging: dict[str, Any] = {"debug": True} if debug else {}  # dynamo does not take it
    under_torch = functools.partial(
        torch_checkpoint,
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
        **debugging,
        **kwargs,
    )
    in_dynamo = torch.compiler.is_dynamo_compiling()
    if not in_dynamo and torch_private.in_other_trace():
        return tracing.run_annotated(function, args, kwargs, policy)
    if policy.saves_nothing:
        return under_torch()
    if in_dynamo and not tracing.IS_POSSIBLE:
        return under_torch(context_fn=tracing.need_torch)
    if in_dynamo:
        _prepare_trace()
        return under_torch(context_fn=functools.partial(_contexts_in_graph, policy))
    hooks = torch_private.saved_tensors_hooks() if respect_saved_tensors_hooks else None
    region = Region(function, args, kwargs, policy, preserve_rng_state, hooks)
    try:
        outputs = under_torch(context_fn=region.contexts)
    except BaseException as error:
        torch_private.close_forward(error)
        raise
    region.end(outputs)
    return outputs


def _decorated(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return checkpointed


class Region:
    """One call of a block under checkpointing. It ends with the forward; the tape lives on in torch's recompute."""

    __slots__ = (
        "args",
        "block",
        "function",
        "hooks",
        "key",
        "known",
        "kwargs",
        "observer",
        "policy",
        "preserves",
        "record",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        policy: Policy,
        preserves: bool,
        hooks: Hooks | None,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.policy = policy
        self.preserves = preserves  # generators, around the recompute
        self.hooks = hooks
        block = block_of(function)
        self.block: BlockRecord | None = None if block is None else record_of(block)
        held = modules_in(function) if block is None else None
        self.key = (policy, signature(args), signature(kwargs) if kwargs else None, held)
        self.known: RegionResult | None = None
        self.observer: Observer | None = None
        self.record: Record | None = None

    def contexts(self) -> Contexts:
        """torch's context_fn: what the forward and the recompute run under."""
        if torch_private.in_proxy_trace() or any(map(torch_private.is_fake, (*self.args, *self.kwargs.values()))):
            return tracing.traced_contexts(self.policy)
        if interception.loaded_modules() != engine.modules:
            prepare()
        block = self.block
        if block is not None and block.key == self.key:  # cheaper than hashing the key
            self.known = block.latest
        else:
            self.known = _kinds(self.function).get(self.key)
            if self.known is None:
                prepare()
            if self.policy.linear:
                self._attach_linear()
        tape = Tape()  # after that: it counts what is intercepted when it begins
        if self.known is not None:
            self.record = Record(tape, self.policy, self.preserves, hooks=self.hooks)
            return self.record, Recompute(tape, self.policy)
        self.record = record = Record(tape, self.policy, self.preserves, [], self.hooks)
        if is_compiled(self.function):
            return record, Recompute(tape, self.policy)
        self.observer = Observer(module_of(self.function), (self.args, self.kwargs), self.policy, record)
        return _Watched(self.observer, record), Recompute(tape, self.policy)

    def _attach_linear(self) -> None:
        block = block_of(self.function)
        if block is None:
            raise FastacError(
                f"{self.policy}: linear=... names Linear modules inside a block, and {describe(self.function)} is no "
                f'module. Checkpoint the block itself, or use a policy of attention, such as "attn_only".'
            )
        if is_compiled(self.function):
            tracing.refuse_linear(self.policy, describe(self.function))
        if not record_of(block).name:  # else `enable` has looked at the names in all blocks
            linear.check_names({block: self.policy})
        linear.attach(block, self.policy)

    def end(self, outputs: Any) -> None:
        """Compare what the forward recorded with the first of its kind. Raises PolicyNotAppliedError."""
        record, known = self.record, self.known
        if record is None or not record.entered:
            return  # gradients are off, here or around a reentrant checkpoint: there is nothing to save
        if known is None:
            known = diagnosis.judge(self.function, self.args, self.kwargs, outputs, record, self.observer)
            if self.observer is not None and self.observer.late:  # loaded by this very region, which could not keep it
                prepare()
                where, op = describe(self.function), self.observer.late[0]
                logger.warning("%s: the library of %s was loaded just now; saved from the next region on", where, op)
                return
            if self.policy.linear:
                linear.check_called(self.policy, record.products, describe(self.function))
            self._remember(known)
        elif record.decomposed:
            problems = [diagnosis.small_ops(describe(self.function), keys) for keys in record.decomposed]
            raise diagnosis.not_applied(self.function, self.policy, problems, len(record.made))
        elif record.made != list(known.made) or record.products != [one.name for one in known.products]:
            if len(record.made) + len(record.products) < len(known.made) + len(known.products):
                self._warn_of_fewer(len(record.made) + len(record.products), len(known.made) + len(known.products))
            known = record.result(known.compiled, known.writing)
        for collector in state.collectors:
            collector.append(known)
        self._note(known, outputs)

    def _remember(self, result: RegionResult) -> None:
        kinds = _kinds(self.function)
        if len(kinds) >= MANY:
            kinds.clear()
        kinds[self.key] = result
        ops = ", ".join(dict.fromkeys(call.op for call in result.calls)) or "none"
        saved = sum(call.saved for call in result.calls)
        where = describe(self.function)
        logger.info("%s: %d attention calls, %d saved by %s (%s)", where, len(result.calls), saved, self.policy, ops)
        enabled = self.block is not None and self.block.name  # by its model, which looks at all of its blocks
        if not enabled and result.calls and not (saved or result.products):
            _warn_once(self.function, "nothing", f"{where}: {self.policy} saves nothing in it: {ops} ran")

    def _warn_of_fewer(self, made: int, before: int) -> None:
        if _warn_once(
            self.function,
            "fewer",
            f"{describe(self.function)}: {made} attention calls and saved products, where there were {before} before "
            f"on inputs of these shapes. Layer drop and branches do that; so does attention that fastac cannot see. "
            f"fastac.verify tells which",
        ):
            prepare()  # an op that was defined since, without any import, is seen from the next region on

    def _note(self, result: RegionResult, outputs: Any) -> None:
        """Note on the block what its region did, and watch compiled code that is new in it."""
        assert self.record is not None
        block, now = self.block, graphs.time()
        # A function that is no block may call another graph each time, for another layer.
        is_new = now > 0 if block is None else now != block.looked
        if is_new:
            graphs.watch(nodes_between(outputs, (self.args, self.kwargs)), self.policy)
        if block is not None:
            block.looked = now
            block.communication = self.record.tape.communication
            if block.latest is not result or block.key is not self.key:
                block.latest, block.key = result, self.key


class _Watched:
    """A forward that is recorded and watched."""

    def __init__(self, observer: Observer, record: Record) -> None:
        self.observer = observer
        self.record = record

    def __enter__(self) -> None:
        self.record.__enter__()
        self.observer.__enter__()

    def __exit__(self, *exception: Any) -> None:
        try:
            self.observer.__exit__(*exception)  # first: a scope that is open must not see what it does
        finally:
            self.record.__exit__(*exception)


def _kinds(function: Any) -> dict[Any, RegionResult]:
    kind = (block_of(function) if state.of_one_block else None) or kind_of(function)
    found = state.kinds.get(kind)
    if found is None:
        found = state.kinds[kind] = {}
    return found


def _warn_once(function: Any, what: str, message: str) -> bool:
    said = state.warned.setdefault(kind_of(function), set())
    if what in said:
        return False
    said.add(what)
    logger.warning("%s", message)
    return True


@torch_private.constant_under_dynamo
def _prepare_trace() -> None:
    """Load plugins and make known kernels visible, which must not happen under AOT's modes."""
    prepare()
    state.traced = True


def _contexts_in_graph(policy: Policy) -> Contexts:
    """The contexts of a region that dynamo put into a graph; called by AOT, or at run time by a backend without AOT."""
    if torch_private.in_proxy_trace():
        return tracing.traced_contexts(policy)
    record = Record(Tape(), policy, owners=[])
    return _WatchedInGraph(Observer(None, (), policy, record), record), Recompute(record.tape, policy)


class _WatchedInGraph(_Watched):
    """The forward of a region whose function is not known, only a graph of it: watched and judged every time.

    AOT runs one, too, on tensors without data, before it traces.
    """

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            small = len(self.observer.small) + len(self.record.decomposed)
            tracing.refuse_unsaved(self.record.policy, small, self.observer.unknown)
            if self.record.made:  # of a backend without AOT: the graph really runs
                for collector in state.collectors:
                    collector.append(self.record.result())


# By the name of torch's function


class patch_checkpoint:  # noqa: N801 called as a function, as torch.set_grad_enabled
    """Let code that calls torch.utils.checkpoint.checkpoint by its name get fastac.checkpoint.

    For trainers whose models checkpoint in their own forward. At once and for good; as a context, until its end. The
    name is replaced in every module that is loaded, so call it after the trainer's imports. What took torch's function
    before in another way (functools.partial, a default argument) keeps it: attention under it is an error.

    Args:
        policy: "attn_only", "long_attn_only" or a fastac.Policy.

    Raises:
        FastacError: it is patched already.
        PolicyNotAppliedError: while patched, attention that the policy saves runs under a checkpoint that is not
            fastac's: torch's function taken before, reentrant, or a library's own.

    Example:
        >>> fastac.patch_checkpoint()
        >>> with fastac.patch_checkpoint("attn_only"):
        ...     train()
    """

    def __init__(self, policy: str | Policy = "attn_only") -> None:
        if torch.utils.checkpoint.checkpoint is not torch_checkpoint:
            raise FastacError(
                "patch_checkpoint: torch.utils.checkpoint.checkpoint is not torch's own any more: another package took "
                "its place, or patch_checkpoint was called before (`with fastac.patch_checkpoint():` ends)."
            )
        self.policy = resolve(policy)
        self._is_on = True
        prepare()

        @functools.wraps(torch_checkpoint)
        def patched(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on:  # taken while it was
                return torch_checkpoint(function, *args, **kwargs)
            if "context_fn" in kwargs and torch_private.is_abstract(args):
                raise FastacError(
                    "patch_checkpoint: torch.compile makes an operator of what is called by this name. Switch the "
                    "model's own checkpointing off, and use fastac.enable(model, blocks=...) and fastac.compile(model)."
                )
            return checkpoint(function, *args, policy=self.policy, **kwargs)

        self._patched: Callable[..., Any] = patched
        self._listener = functools.partial(diagnosis.ran_past_patch, self.policy)
        engine.listeners.append(self._listener)
        replaced = _replace(torch_checkpoint, patched)
        logger.info("patch_checkpoint(%s): replaced %s", self.policy, ", ".join(replaced))

    def __enter__(self) -> patch_checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_on = False
        engine.listeners.remove(self._listener)
        _replace(self._patched, torch_checkpoint)


def _replace(old: object, new: object) -> list[str]:
    """Give every module that holds one function another one under the same name. Returns the names."""
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fastac":  # which calls torch's own
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                vars(module)[attribute] = new
                replaced.append(f"{name}.{attribute}")
    return replaced
