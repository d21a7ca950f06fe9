"""checkpoint(function, *args, policy=...): one call of a block under checkpointing.

Life of one call: `checkpoint` opens a `Region` (engine/region.py) with a `Tape` that stores what the policy saves
(engine/tape.py), and runs the forward in both. There are two ways to run it. The first region of a kind is *observed*:
`fastac.diagnosis` looks at every op for attention that could not be saved. Later regions of the kind are *expected* to
make the same calls. Backward then needs only the region, and nothing of this module.

`patch_checkpoint` replaces torch's function in all modules that call it by name.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from fastac.backends.plugins import prepare
from fastac.compiled import tracing
from fastac.diagnosis import every_step
from fastac.diagnosis.observation import Observation
from fastac.diagnosis.observer import PassThrough
from fastac.engine import interception, kinds, linear, offload, torch_private
from fastac.engine.beginning import Beginning, Draws
from fastac.engine.blocks import block_of, describe, is_compiled, modules_in, modules_run_by, signature, state_of
from fastac.engine.process import process, thread
from fastac.engine.region import Region
from fastac.engine.results import Kind, RegionResult
from fastac.engine.tape import Hooks, Tape
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import DISABLED, Policy, resolve

logger = logging.getLogger("fastac")

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@overload
def checkpoint(
    function: None = None,
    *,
    policy: str | Policy = "attn_only",
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tracing.Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]: ...


@overload
def checkpoint(function: Callable[..., _Result], *args: Any, policy: str | Policy = ..., **kwargs: Any) -> _Result: ...


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    policy: str | Policy = "attn_only",
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tracing.Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Checkpoint a function, except for what the policy saves. Replaces torch.utils.checkpoint.checkpoint.

    Args:
        function: a block or any callable; called as function(*args, **kwargs), and again in backward. Without it, a
            decorator is returned.
        policy: "attn_only", "long_attn_only", "full", "none" or a fastac.Policy.
        preserve_rng_state, early_stop: as in torch's function.
        determinism_check: "default" compares recompute with the forward. In every step: shapes, dtypes and versions
            of weights. In steps 0, 1, 2, 4, 8, ... of a block: values too. Values are not compared with
            preserve_rng_state=False. "none" compares only the number of tensors that are saved.
        respect_saved_tensors_hooks: True passes saved outputs to the saved_tensors_hooks around the call, such as
            torch.autograd.graph.save_on_cpu, as torch 2.14 does under selective checkpointing.
        use_reentrant, context_fn: any value but the default is refused.
        debug: torch's debug mode, only for policy "full".

    Returns:
        The outputs of the function.

    Raises:
        PolicyNotAppliedError: an attention call that the policy saves could not be saved.
        FastacError: reentrant checkpointing or a context_fn was asked for. In backward: recompute differs from the
            forward; that error is a torch.utils.checkpoint.CheckpointError as well.

    Example:
        >>> hidden = fastac.checkpoint(block, hidden, text, policy="attn_only")
    """
    options: dict[str, Any] = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "early_stop": early_stop,
    }
    if function is None and not args and not kwargs:
        options |= {"policy": policy, "use_reentrant": use_reentrant, "context_fn": context_fn, "debug": debug}
        return functools.partial(_decorated, respect_saved_tensors_hooks=respect_saved_tensors_hooks, **options)
    if function is None:
        raise FastacError("checkpoint: inputs or unknown keywords were given without a function")
    if use_reentrant or context_fn is not noop_context_fn:
        raise FastacError(
            f"checkpoint({'use_reentrant=True' if use_reentrant else 'context_fn=...'}): a reentrant checkpoint can "
            f"save nothing, and a context_fn would replace the policy. Pass use_reentrant=False and no context_fn."
        )
    check_determinism("checkpoint", determinism_check)
    return run(function, args, kwargs, resolve(policy), options, debug, respect_saved_tensors_hooks)


def run(
    function: Any, args: Any, kwargs: Any, policy: Policy, options: Any, debug: bool = False, hooks: bool | None = None
) -> Any:
    """Call a function under checkpointing.

    options: preserve_rng_state, determinism_check and early_stop; these, debug and hooks are as in `checkpoint`.
    """
    if policy.checkpoints and _is_eager(args, kwargs, debug):
        if (off := torch_private.hooks_off()) is not None or torch_private.in_symbolic_trace((args, kwargs)):
            seen = f"torch says: {off.partition('. ')[0]}" if off else "torch.fx.symbolic_trace would leave it out"
            raise FastacError(
                f"{describe(function)} is called where a checkpoint (policy {policy}) cannot run. {seen}.\n"
                f'Call fastac.disable(model) before that, or give the block policy "none".'
            )
        # They are read before the region opens: inside it, its own hooks are the innermost ones.
        user_hooks = torch_private.user_hooks() if hooks else None
        return _RegionCall(function, args, kwargs, policy).run(user_hooks, **options)
    return _run_without_region(function, args, kwargs, policy, options, debug)


def _is_eager(args: Any, kwargs: Any, debug: bool) -> bool:
    """Whether eager code makes the call, with gradients on: no trace, no tensors without data, no debugging."""
    # Not torch.compiler.is_compiling(), which is of the process: another thread may compile while this one trains.
    return (
        not torch.compiler.is_dynamo_compiling()
        and torch.is_grad_enabled()
        and not (DISABLED or torch_private.in_debug_mode(debug))
        and not torch_private.is_traced((*args, *kwargs.values()))
    )


def _run_without_region(function: Any, args: Any, kwargs: Any, policy: Policy, options: Any, debug: bool) -> Any:
    """Call a function in a trace, without gradients, or for debugging: torch's own checkpoint, or none."""
    if not policy.checkpoints:
        # Inside a region of fastac that saves, a call under "none" is a part of that region.
        if not torch.compiler.is_compiling() and process.thread.scope is None and torch_private.innermost_checkpoint():
            raise PolicyNotAppliedError(
                f'policy "none": {describe(function)} should not be checkpointed, but it runs inside another '
                f"checkpoint (torch's own, or fastac's with policy \"full\"). Switch the model's own checkpointing off."
            )
        return function(*args, **kwargs)
    if torch_private.in_export():
        # Exported programs recompute nothing, and marks of a checkpoint would stay in them (torch 2.13).
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return tracing.run_under_torch(function, args, kwargs, policy, options)
    # make_fx recomputes nothing that it traced. The region is marked, for the passes of fastac.graph.
    if torch_private.in_other_trace():
        return tracing.run_annotated(function, args, kwargs, policy)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)  # there is nothing to recompute
    # AOT and plans run on tensors without data, which a region cannot compare. torch's checkpoint asks the same policy.
    options = {**options, "debug": torch_private.in_debug_mode(debug)}
    return tracing.run_under_torch(function, args, kwargs, policy, options)


def check_determinism(call: str, determinism_check: str) -> None:
    """Raise FastacError for an unknown `determinism_check`. call: the public function that got it."""
    if determinism_check not in ("default", "none"):
        raise FastacError(f'{call}(determinism_check={determinism_check!r}): there are "default" and "none".')


def _decorated(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return checkpointed


class _RegionCall:
    """Decides how the forward of one region runs, observed or expected, and judges its calls."""

    __slots__ = ("args", "block", "function", "kind", "kwargs", "observed_state", "policy", "state")

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.policy = policy
        self.block = block_of(function)
        self.state = kinds.state_of_function(function) if self.block is None else state_of(self.block)
        # The state that knows which kinds are watched. A closure is a new function in each call: then it is the state
        # of the block that the closure holds.
        self.observed_state = self.state

    def run(self, hooks: Hooks | None, preserve_rng_state: bool, determinism_check: str, early_stop: bool) -> Any:
        """Run the forward in a region. Returns the outputs. Raises PolicyNotAppliedError."""
        function, policy, state = self.function, self.policy, self.state
        # In the recompute of another region. It does not begin a step, and its own backward comes at once.
        is_nested = torch_private.in_backward()
        compares_values = not is_nested and state.begin_region()
        # While a CUDA graph is being captured, nothing can be read from the device. Most regions do not ask.
        compares_values = compares_values and not (
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        )
        tape = observation = stash = measured = None
        if not is_nested:
            if thread.measurement is not None:
                measured = thread.measurement.begin(self.block, (self.args, self.kwargs))
            stash = offload.begin_region(policy, function, state, (*self.args, *self.kwargs.values()))
        if policy.is_selective:
            self.kind = self._kind()
            is_observed = self.kind.first is None or self.observed_state.watched.get(self.kind, 0) > 0
            # A kind may be seen first in a step that compares nothing, when a block takes a branch for the first time.
            compares_values = compares_values or (is_observed and not is_nested)
            tape = Tape(policy, preserve_rng_state, [] if is_observed else None, hooks, measured)
            if is_observed:
                earlier = kinds.compiled_result(function, self.kind.key)
                observation = Observation(function, self.args, self.kwargs, tape, earlier)
        # A function that is not a block may run any module that it refers to.
        modules = [self.block] if self.block is not None else modules_run_by(function, self.args, self.kwargs)
        # Some functions of torch take another path under any mode. Recompute gets one if the forward has one.
        has_mode = torch_private.in_dispatch_mode() or (observation is not None and observation.is_watched)
        beginning = Beginning(
            function,
            self.args,
            self.kwargs,
            modules,
            state,
            draws=preserve_rng_state,
            looks=compares_values,
            mode=PassThrough if has_mode else None,
        )
        compares_metadata = determinism_check == "default"
        compares_values = compares_values and compares_metadata
        draws = Draws((*self.args, *self.kwargs.values())) if compares_values and not preserve_rng_state else None
        region = Region(
            beginning,
            tape,
            draws,
            compares_metadata=compares_metadata,
            compares_values=compares_values and preserve_rng_state,
            early_stop=early_stop,
            stash=stash,
        )
        if tape is None:
            outputs = region.forward(self.args)
        elif observation is not None:
            outputs = self._run_observed(region, tape, observation)
        else:
            outputs = self._run_expected(region, tape)
        if stash is not None and region.slots:
            region.offload(self.args, stash)
        if measured is not None:
            measured.end_forward(stash)
        return outputs

    def _kind(self) -> Kind:
        """The kind of the region that begins."""
        # A library that was imported since the last region has brought ops, which are not intercepted yet.
        if interception.loaded_modules() != process.modules:
            prepare()
        function, policy, state = self.function, self.policy, self.state
        # One closure may run blocks of several classes, and each class makes calls of its own.
        held = modules_in(function) if self.block is None else []
        if held:
            self.observed_state = state_of(held[0])
        key = (policy, *signature(self.args, self.kwargs), *map(type, held))
        # Comparing keys costs less than hashing one.
        if self.block is not None and state.kind is not None and state.key == key:
            return state.kind
        kind = kinds.kind_of(function, key)
        if kind.first is None:
            # An op that is defined in a script or a notebook loads no module. So ops are looked for here as well.
            prepare()
        if policy.linear:
            self._attach_linear()
        state.key, state.kind = key, kind
        return kind

    def _attach_linear(self) -> None:
        block = self.block
        if block is None:
            raise FastacError(
                f"{self.policy}: linear=... names Linear modules inside a block, and {describe(self.function)} is not "
                f'a module. Checkpoint the block itself, or use a policy of attention, such as "attn_only".'
            )
        if is_compiled(self.function):
            tracing.refuse_eager_only(self.policy, describe(self.function))
        linear.attach(block, self.policy, is_strict=thread.measurement is None)

    def _run_observed(self, region: Region, tape: Tape, observation: Observation) -> Any:
        """Run the first region of a kind, or a watched region. Raises PolicyNotAppliedError for hidden attention."""
        outputs = region.forward(self.args, observation)
        result = observation.result(outputs)
        first = self.kind.first
        if first is None:
            if self.policy.linear and self.block is not None and tape.measured is None:
                linear.check_called(self.policy, tape.products, self.block, describe(self.function))
            self._remember(result, tape)
        elif left := self.observed_state.watched.get(self.kind):
            self.observed_state.watched[self.kind] = 0 if result.count < first.count else left - 1
        self._note(region, result, tape)
        return outputs

    def _run_expected(self, region: Region, tape: Tape) -> Any:
        """Run a region that should make the calls of the first one of its kind. If it makes fewer, watch the next."""
        outputs, first = region.forward(self.args), self.kind.first
        assert first is not None
        result = first
        # A backend that is set after the first region decomposes attention in later ones. The tape sees that by itself.
        if tape.decomposed:
            problems = [every_step.small_ops(describe(self.function), keys) for keys in tape.decomposed]
            raise every_step.not_applied(self.function, self.policy, problems, len(tape.attention_calls))
        if not tape.made_the_calls_of(first):
            result = tape.result(first.compiled, first.writing, first.unknown)
            if result.count < first.count and first.compiled:
                # Compiled code can only be observed by running it again, and ranks may communicate in it.
                every_step.warn_of_fewer(self.function)
            elif result.count < first.count:
                self.observed_state.watched.setdefault(self.kind, self.observed_state.WATCHED)
        self._note(region, result, tape)
        return outputs

    def _note(self, region: Region, result: RegionResult, tape: Tape) -> None:
        """Note what the region did, for reports and for the next region."""
        if not region.slots:
            tape.communication, result = None, RegionResult(result.attention_calls, (), has_graph=False)
        for collector in process.collectors:
            collector.append(result)
        # Functions that are not blocks share a state by their code, so none of them has a latest region.
        if self.block is not None:
            self.state.compilations_seen = torch_private.compilations.so_far()
            self.state.communication, self.state.latest = tape.communication, result

    def _remember(self, result: RegionResult, tape: Tape) -> None:
        """Note the result of the first region of a kind, and log it."""
        self.kind.first = result
        ops = ", ".join(dict.fromkeys(call.op for call in result.calls)) or "none"
        saved = sum(call.saved for call in result.calls)
        where = describe(self.function)
        logger.info("%s: %d attention calls, %d saved by %s (%s)", where, len(result.calls), saved, self.policy, ops)
        # A model that was enabled checks all of its blocks together.
        is_enabled = self.block is not None and bool(self.state.name)
        if is_enabled or saved or result.products or (tape.communication is not None and tape.communication.saved):
            return
        if result.calls:
            kinds.warn_once(self.function, "nothing", f"{where}: {self.policy} saves nothing in it: {ops} ran")
        elif result.unknown:
            said = every_step.nothing_known(where, self.policy, result.unknown)
            kinds.warn_once(self.function, "nothing", said)


class patch_checkpoint:  # noqa: N801 called as a function, as torch.set_grad_enabled
    """Replace torch.utils.checkpoint.checkpoint by fastac.checkpoint, for code that calls it by name.

    For trainers whose models checkpoint in their own forward. It applies at once and stays; as a context, until the
    context ends. The name is replaced in every loaded module, so call it after the trainer's imports. Code that took
    torch's function earlier in another way (functools.partial, a default argument) keeps it: attention under it is an
    error.

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
                "patch_checkpoint: torch.utils.checkpoint.checkpoint is no longer torch's own: another package "
                "replaced it, or patch_checkpoint was called before (`with fastac.patch_checkpoint():` ends)."
            )
        self.policy = resolve(policy)
        self._is_on = True
        # If every checkpoint was captured before, no region opens, and nothing else would intercept the ops.
        prepare()

        @functools.wraps(torch_checkpoint)
        def patched(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on:  # somebody copied the function while it was on
                return torch_checkpoint(function, *args, **kwargs)
            if "context_fn" in kwargs and torch_private.is_abstract(args):
                raise FastacError(
                    "patch_checkpoint: torch.compile makes an operator of what is called by this name. Switch the "
                    "model's own checkpointing off, and use fastac.enable(model, blocks=...) and fastac.compile(model)."
                )
            return checkpoint(function, *args, policy=self.policy, **kwargs)

        self._patched: Callable[..., Any] = patched
        # Code that took torch's function before this call keeps it. The listener turns its attention into an error.
        self._listener = functools.partial(every_step.ran_past_patch, self.policy)
        process.listeners.append(self._listener)
        replaced = _replace(torch_checkpoint, patched)
        logger.info("patch_checkpoint(%s): replaced %s", self.policy, ", ".join(replaced))

    def __enter__(self) -> patch_checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_on = False
        process.listeners.remove(self._listener)
        # All modules are searched again: modules that were imported meanwhile have the patched function as well.
        _replace(self._patched, torch_checkpoint)


def _replace(old: object, new: object) -> list[str]:
    """Replace a function in every module that has it. Returns its names."""
    replaced = []
    # Other threads may import meanwhile, and sys.modules may hold any object.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fastac":  # fastac calls torch's own function
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                vars(module)[attribute] = new
                replaced.append(f"{name}.{attribute}")
    return replaced
