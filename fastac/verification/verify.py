"""verify: a step with a policy, compared with a step without checkpointing.

`_Verifier` takes the steps, of the whole model or of each block. `ComparedSteps` compares them, and takes
more if results differ: noise.py says when a difference is an error. step.py says what a step is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import errors, hook
from fastac.backends.plugins import prepare
from fastac.checkpointing import checkpoint
from fastac.diagnosis.tables import new_table, render, wrapped
from fastac.engine import checkpoint_wrappers
from fastac.engine.beginning import generators_preserved
from fastac.engine.blocks import known_state, set_state
from fastac.engine.module_state import modules_preserved
from fastac.engine.process import process
from fastac.errors import FastacError, PolicyNotAppliedError, class_name, readable_bytes
from fastac.models.switches import switches_of
from fastac.policy import BlockPolicies, Policy, resolve
from fastac.verification.noise import ComparedSteps, RunStep
from fastac.verification.ranks import Group, OtherRankFailed
from fastac.verification.recompute import MOST_UNKNOWN, RecomputeProfile, latest
from fastac.verification.report import Offloaded, block_states, check_whole, decided_calls, report
from fastac.verification.step import Step, fresh, run_step

logger = logging.getLogger("fastac")

_full_checkpoint = functools.partial(torch_checkpoint, use_reentrant=False)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. Executions are of attention kernels, in one step."""

    subject: str
    policy: str
    reference: str
    compared: int
    different: tuple[str, ...]
    """Results that are not bitwise equal."""
    largest_difference: float
    """The largest difference of a result, relative to its norm. If results are broken: the largest of a broken one."""
    noise: float
    """The largest difference between runs of the reference, above 0 if kernels are not deterministic. If `compiled`,
    one of these runs is not compiled."""
    broken: tuple[str, ...]
    """Results that differ by more than noise in every run of the policy; or by more than rounding in one run, if those
    of the reference are equal."""
    reference_executions: tuple[int, int]
    policy_executions: tuple[int, int]
    saved: int
    recomputed: int
    saved_bytes: int
    allowed_again: int
    """Attention kernels that may run in backward: those that the policy recomputes, and the model's own."""
    linear_saved: int = 0
    linear_bytes: int = 0
    """Bytes of saved outputs of Linear modules; not in saved_bytes."""
    compiled: bool = False
    """Whether the model is compiled as a whole, and results differ."""
    offloaded: Offloaded | None = None
    is_enabled: bool = True
    """Whether the model was enabled. If not, this is what `enable` would do."""
    runs: int = 1
    """How often the reference ran, with the runs that measure the noise."""
    deterministic: bool = False
    """Whether results are bitwise equal, but only with torch's deterministic kernels."""
    kernels: tuple[str, ...] = ()
    """Attention ops of a training step."""
    elsewhere: tuple[int, int] = (0, 0)
    """Executions in the forward outside of blocks (0 if not known), and in blocks that no backward runs again."""
    compared_kernels: tuple[str, ...] = ()
    """Attention ops of the steps that were compared. They differ from `kernels` if those are not deterministic."""
    remark: str = ""
    """If results are compared within noise, why the steps did not run with deterministic kernels."""
    recompute: RecomputeProfile | None = None
    """What recompute ran, and how long it took."""

    def __str__(self) -> str:
        would = "" if self.is_enabled else " (not enabled: this is what fastac.enable would do)"
        table = new_table(None, "promise", self.reference, self.policy, "kept")
        equal = f"{self.compared - len(self.different)} of {self.compared} bitwise equal"
        table.add_row("outputs and gradients", "", equal, self._equality)
        if self.compared_kernels != self.kernels:
            compared = "\n".join(self.compared_kernels)
            table.add_row("attention ops compared", compared, compared, "in training: " + "\n".join(self.kernels))
        forward, backward = zip(self.reference_executions, self.policy_executions, strict=True)
        same, once = forward[0] == forward[1], self.policy_executions[1] <= self.allowed_again
        unseen = "none seen" if not forward[0] else ""
        table.add_row("attention runs in forward", str(forward[0]), str(forward[1]), unseen or _yes(same))
        for where, count in zip(("outside of blocks", "in frozen blocks"), self.elsewhere, strict=True):
            if count > 0:
                table.add_row(f"of them {where}", "", str(count), "")
        table.add_row("attention runs in backward", str(backward[0]), str(backward[1]), unseen or _yes(once))
        table.add_row("attention calls saved", "", f"{self.saved} of {self.saved + self.recomputed}", "")
        if self.linear_saved:
            size = readable_bytes(self.linear_bytes)
            table.add_row("outputs of Linear saved", "", f"{self.linear_saved} ({size})", "")
        table.add_row("bytes saved", "", readable_bytes(self.saved_bytes), "")
        if self.offloaded is not None:
            table.add_row("offloaded", "", str(self.offloaded), "")
        title = f"{self.subject}: {self.policy} against {self.reference}{would}"
        lines = wrapped(title), render(table), str(self.recompute or ""), wrapped(self.remark)
        return "\n".join(filter(None, lines))

    @property
    def _equality(self) -> str:
        if self.broken:
            return _yes(False)
        if not self.different:
            return "bitwise, deterministic kernels" if self.deterministic else _yes(True)
        if self.compiled:
            return f"within what compiling {self.reference} changes by itself"
        return f"within the noise of {self.runs} runs ({self.noise:.1g} of the norm)"


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "no"


def verify(
    model: torch.nn.Module,
    *args: Any,
    policy: hook.GivenPolicy | None = None,
    blocks: Any = None,
    reference: str = "none",
    per_block: bool = False,
    **kwargs: Any,
) -> Verification:
    """Run a model without checkpointing and with a policy; compare outputs, every gradient, and kernel executions.

    If results differ, the steps run again with torch's deterministic kernels, and must be bitwise equal. If even then
    two runs of the reference differ, an error is a difference that every run of the policy has and that is larger than
    the differences between runs of the reference. A model that is compiled as a whole is another graph with
    checkpointing than without, so compiling the reference counts as noise, too.

    Executions are counted in this thread and its backward, by torch's profiler. Let nothing else train meanwhile, and
    do not call it inside a profile of your own, which it would end. Afterwards the gradients of parameters, buffers,
    generator states and checkpointing are as before. With several processes, every rank must call it. If it raises on
    one rank, it raises on all.

    An enabled model is verified as it is now: if fastac was switched off since `enable`, that is an error.

    Args:
        model: a diffusers model, a model that is enabled, or any module, which is then taken as one block.
        args, kwargs: the arguments of one call of the model.
        policy, blocks: as in `enable`; by default those of the enabled model.
        reference: "none", or "full" for a model that does not fit into memory without checkpointing.
        per_block: run the model once under full checkpointing, then compare block by block, on the inputs that each
            block had. Needs the memory of one block without checkpointing.

    Returns:
        What was measured, and a table when printed.

    Raises:
        PolicyNotAppliedError: attention that was to be saved ran again, or none was saved; fastac was switched off.
        FastacError: a result differs, or an option cannot be honoured.

    Example:
        >>> print(fastac.verify(transformer, **inputs))
    """
    group = Group()
    try:
        return group.run(lambda: _Verifier(group, model, args, kwargs, policy, blocks, reference, per_block).verify())
    except OtherRankFailed as failed:
        # All ranks raise the same class, so that the `except` of a training script does the same on each of them.
        error_class = getattr(errors, failed.error_name, FastacError)
        raise error_class(f"verify failed on another rank. {failed}") from None


@dataclasses.dataclass
class _Verifier:
    """One call of `verify`: it takes steps of the whole model, or of one block after another."""

    group: Group
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Any
    blocks: Any
    reference: str
    per_block: bool

    def __post_init__(self) -> None:
        """Check the arguments. The policy and the blocks are those of the enabled model if they are not given."""
        if self.reference not in ("none", "full"):
            raise FastacError(f'verify(reference={self.reference!r}): there are "none" and "full"')
        self.inner: Any = check_whole(self.model, "verify")
        prepare()
        self.found, enabled = report(self.inner), hook.enabled_on(self.inner)
        # To enable the model anew would put back what was changed since.
        self.is_as_found = enabled is not None and self.policy is None and self.blocks is None
        if self.is_as_found and not self.found.active:
            what = self.found.problem.partition(". ")[0]
            raise PolicyNotAppliedError(f"verify: {what}.\nUndo that, or call fastac.enable again.")
        # A block that is trained with "none" would raise here under the comparison by value.
        self.determinism_check = "default" if enabled is None else enabled.determinism_check
        # `hook.enable` takes the blocks that the model is enabled with.
        if enabled is not None and enabled.host.forwards and self.blocks is None:
            modules = set(self.inner.modules())  # blocks may have been taken out since
            self.blocks = [block for block in enabled.blocks.values() if block in modules]
        if enabled is None and torch.utils.checkpoint.checkpoint is not torch_checkpoint:
            raise FastacError(
                "verify: patch_checkpoint is on, and verify would prove only `enable`. With logging at INFO, each "
                "kind of checkpoint says what it saves."
            )
        if self.policy is None:
            self.policy = "attn_only" if enabled is None else enabled.planner or enabled.policy
        if enabled is not None and isinstance(self.policy, BlockPolicies):
            self.policy = {name: enabled.policy_of(block) for name, block in enabled.blocks.items()}

    def verify(self) -> Verification:
        """Take the steps and compare them. Raises as the public `verify`."""
        with _as_found(self.inner), contextlib.nullcontext() if self.is_as_found else _disabled(self.inner):
            if self.blocks is None and not hasattr(self.inner, "enable_gradient_checkpointing"):
                result = self._verify_block(self.model, self.args, self.kwargs, resolve(self.policy))
            else:
                if not self.is_as_found:
                    hook.enable(self.inner, self.policy, blocks=self.blocks, determinism_check=self.determinism_check)
                steps = self._reference_step, self._policy_step
                enabled = hook.enabled_on(self.inner)
                if enabled is not None and enabled.planner is not None and enabled.planner.latest is None:
                    self._policy_step(False)  # policy "auto" measures its first step, and saves nothing in it
                result = self._verify_blocks() if self.per_block else self._compare(*steps)
        _raise_if_broken(result)
        if result.recompute is not None:
            latest[self.inner] = result.recompute
            # Under a policy that saves nothing, all of recompute is wanted: nothing is worth a warning.
            watched = result.saved + result.recomputed + result.linear_saved
            for name, share in result.recompute.shares().items() if watched else ():
                if share > MOST_UNKNOWN and result.recompute.marks[name] == "unknown":
                    said = "takes %.0f %% of recompute, and fastac does not know it. If it is attention, have it saved"
                    logger.warning(f"verify: %s {said}: docs/adding_a_backend.md", name, 100 * share)
        return result

    def _reference_step(self, is_counted: bool) -> Step:
        """A step of the whole model without fastac."""
        # A trainer's CheckpointWrappers would checkpoint the reference, too.
        with _disabled(self.inner), checkpoint_wrappers.idle(self.inner):
            if self.blocks is not None and self.reference == "full":
                hook.enable(self.inner, "full", blocks=self.blocks, determinism_check=self.determinism_check)
            elif self.reference == "full":
                self.inner.enable_gradient_checkpointing(_full_checkpoint)
            elif hasattr(self.inner, "disable_gradient_checkpointing"):
                self.inner.disable_gradient_checkpointing()
            return run_step(self.model, self.model, self.args, self.kwargs, is_counted)

    def _policy_step(self, is_counted: bool) -> Step:
        """A step of the whole model, enabled."""
        step = run_step(self.model, self.model, self.args, self.kwargs, is_counted)
        if step.calls or not step.graphs:
            return step
        # The model is compiled as a whole: its regions are inside graphs, and their calls were decided in the trace.
        calls = decided_calls(self.inner, step.graphs).values()
        return dataclasses.replace(step, calls=[call for block in calls for call in block], in_graph=True)

    def _verify_blocks(self) -> Verification:
        """Verify each block by itself, on the inputs that it has in a full-checkpointed forward of the model."""
        if self.blocks is not None:
            raise FastacError("verify(per_block=True) is for models that are enabled without blocks=...")
        enabled: Any = hook.enabled_on(self.inner)
        regions: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        args, kwargs = fresh((self.args, self.kwargs))
        with _disabled(self.inner), checkpoint_wrappers.idle(self.inner), contextlib.ExitStack() as no_sync:
            self.inner.enable_gradient_checkpointing(functools.partial(_captured, regions))
            for module in self.model.modules():
                if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                    # No backward follows, for which the next forward would wait.
                    no_sync.enter_context(module.no_sync())
            with torch.enable_grad():
                self.model(*args, **kwargs)
        # Ranks exchange what they found in each block: a rank with fewer blocks would leave the others waiting.
        if not self.group.agree(len(regions)):
            raise FastacError("verify(per_block=True): ranks have different numbers of blocks. Verify without it.")
        if not regions:
            raise FastacError(f"verify(per_block=True): {class_name(self.inner)} checkpointed no block on these inputs")
        parts = [self._verify_block(block, args, kwargs, enabled.policy_of(block)) for block, args, kwargs in regions]
        return _together(parts, enabled.policy_name)

    def _verify_block(self, block: Any, args: Any, kwargs: Any, policy: Policy) -> Verification:
        """Verify one block, or a module that is taken as a block."""
        reference = _full_checkpoint if self.reference == "full" else checkpoint_wrappers.call_plainly
        checkpointed = functools.partial(checkpoint, policy=policy, determinism_check=self.determinism_check)

        def step_of(function: Any, is_counted: bool) -> Step:
            with checkpoint_wrappers.idle(block):
                return run_step(block, function, (block, *args), kwargs, is_counted)

        return self._compare(functools.partial(step_of, reference), functools.partial(step_of, checkpointed), policy)

    def _compare(self, reference_step: RunStep, policy_step: RunStep, policy: Policy | None = None) -> Verification:
        """Take steps and compare them. policy: of a single block; None for those of the enabled model."""
        # The reference "full" is torch's checkpoint, whose recompute writes buffers a second time: do not compare them.
        with_buffers = self.reference != "full"
        compared = ComparedSteps(self.group, reference_step, policy_step, self._forget_kinds, with_buffers)
        runs, expected, later = compared.runs, compared.expected, compared.later
        # Policy "auto" chooses in the first of these steps.
        enabled = hook.enabled_on(self.inner) if policy is None else None
        used, name = (policy, str(policy)) if enabled is None else (enabled.policy, enabled.policy_name)
        plan = hook.plan_in_words(self.inner) if policy is None else ""
        # The message lists only the first five: the largest differences.
        different = runs.different
        broken = sorted(runs.broken(), key=lambda name: -different.get(name, 0.0))
        saved = [call for call in later.calls if call.saved]
        # Attention kernels of the backward itself, as of diffusers' context parallelism.
        in_backward = expected.executions[1] if self.reference == "none" else 0
        # Regions under "full" are not watched, so their calls are not known: all that was not saved may run again.
        unseen = not isinstance(used, Policy) or not used.is_selective
        return Verification(
            subject=class_name(self.inner),
            policy=name,
            reference=self.reference,
            compared=len(runs.reference),
            different=tuple(different),
            largest_difference=max((different.get(name, 0.0) for name in broken or different), default=0.0),
            # If results are broken, the message compares them with their own noise, not with that of other results.
            noise=max((runs.noise[name] for name in broken or runs.noise), default=0.0),
            broken=tuple(broken),
            reference_executions=expected.executions,
            policy_executions=later.executions,
            saved=len(saved),
            recomputed=len(later.calls) - len(saved),
            saved_bytes=sum(call.saved_bytes for call in saved),
            allowed_again=in_backward + (later.executions[0] if unseen else len(later.calls)) - len(saved),
            linear_saved=len(later.products),
            linear_bytes=sum(product.saved_bytes for product in later.products),
            compiled=compared.is_compiled,
            offloaded=later.offloaded,
            is_enabled=self.found.active,
            runs=runs.count,
            deterministic=compared.is_deterministic and not runs.different,
            kernels=expected.kernels,
            elsewhere=(0 if unseen else later.executions[0] - len(later.calls) - later.frozen, later.frozen),
            compared_kernels=compared.kernels,
            remark="\n".join(filter(None, (plan, compared.remark))),
            recompute=later.recompute,
        )

    def _forget_kinds(self) -> None:
        """Make the next region of each kind a first one, which is observed."""
        process.kinds = weakref.WeakKeyDictionary()
        for state in block_states(self.inner.modules()):
            state.key = None


def _together(parts: list[Verification], policy: str) -> Verification:
    """The verifications of several blocks as one."""
    # The message about what is broken names its own noise, not that of other blocks.
    judged = [part for part in parts if part.broken] or parts

    def merged(name: str) -> Any:
        of_parts = judged if name in ("largest_difference", "noise", "runs") else parts
        values = [getattr(part, name) for part in of_parts]
        if name == "recompute":
            profiles = [profile for profile in values if profile is not None]
            return functools.reduce(operator.add, profiles) if profiles else None
        if name in ("kernels", "compared_kernels"):
            return tuple(dict.fromkeys(kernel for kernels in values for kernel in kernels))
        if name in ("different", "broken"):
            return tuple(f"block {number}: {result}" for number, results in enumerate(values) for result in results)
        # The remark may be of any block: an op of only one block may lack a deterministic kernel.
        if isinstance(values[0], str):
            return next(filter(None, values), "")
        if isinstance(values[0], tuple):
            return tuple(map(sum, zip(*values, strict=True)))
        # A bool is an int in Python, and must not be summed. Of differences and noise, the largest counts.
        return max(values) if name == "runs" or isinstance(values[0], (bool, float)) else sum(values)

    names = {field.name for field in dataclasses.fields(Verification)} - {"policy", "offloaded"}
    return Verification(policy=policy, **{name: merged(name) for name in names})


def _raise_if_broken(result: Verification) -> None:
    """Raise FastacError if a result differs, PolicyNotAppliedError if attention ran again or none was saved."""
    under, ran = f"verify: {result.subject} under {result.policy}", result.reference_executions[0]
    if result.broken:
        listed = ", ".join(result.broken[:5]) + (", ..." if len(result.broken) > 5 else "")
        noise = f"differ there by up to {result.noise:.2g}" if result.noise else "are equal there"
        raise FastacError(
            f"{under}: {len(result.broken)} of {result.compared} outputs and gradients differ from {result.reference} "
            f"checkpointing, by up to {result.largest_difference:.2g} of their norm: {listed}.\n{result.runs} runs of "
            f"the reference {noise}. A block computes something else when it is run again. "
            f"For a diffusers model, verify(..., per_block=True) tells which.\n{result}"
        )
    again = result.policy_executions[1] - result.allowed_again
    if again > 0 or result.policy_executions[0] != ran:
        raise PolicyNotAppliedError(
            f"{under}: {max(again, 0)} attention kernels that were to be saved ran again in backward.\n{result}"
        )
    # Under `min_kv`, and if blocks have policies of their own, it may be right that no call was saved.
    saves_all = result.policy.startswith("attn_only") and "min_kv" not in result.policy and not result.elsewhere[1]
    # If no known attention ran, the counts are equal and prove nothing.
    if "attn_only" in result.policy and (ran == 0 or (saves_all and result.saved == 0)):
        raise PolicyNotAppliedError(
            f"{under}: {ran} known attention kernels ran, and none was saved.\n"
            f"The model's attention is outside of the checkpointed blocks, linear, written out in small ops, or a "
            f'kernel without a row: see docs/adding_a_backend.md, or use policy="full".\n{result}'
        )


def _captured(regions: list[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    regions.append((function, *fresh((args, kwargs))))
    return _full_checkpoint(function, *args, **kwargs)


@contextlib.contextmanager
def _as_found(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model at the end: gradients, buffers, generator states, and states of blocks.

    Inside, blocks are in the state in which `enable` leaves them, and regions have kinds of their own.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = [(module, known_state(module)) for module in model.modules()]
    for module, state in states:
        # A copy is as new. Regions whose backward is still to come hold the state itself, which stays as it is.
        set_state(module, copy.copy(state))
    # What other models of the process observed stays as it is. Kinds are by block: verify proves each block.
    results, process.kinds, process.kinds_are_of_one_block = process.kinds, weakref.WeakKeyDictionary(), True
    try:
        with generators_preserved(), modules_preserved([model]):
            yield
    finally:
        process.kinds, process.kinds_are_of_one_block = results, False
        for module, state in states:
            set_state(module, state)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def _disabled(model: torch.nn.Module) -> Iterator[None]:
    """Inside, fastac is off, and the model's own checkpointing may be set. At the end both are as they were.

    What was changed since `enable` stays changed, which `attach` would put right.
    """
    enabled = hook.enabled_on(model)
    owners = [*model.modules(), *([] if enabled is None else [enabled, enabled.host])]
    parts = [vars(owner) for owner in owners]
    parts += [hooks for part in parts for name, hooks in part.items() if "hooks" in name and isinstance(hooks, dict)]
    before = [dict(part) for part in parts]
    hook.disable(model)
    after = [dict(part) for part in parts]
    # These are the flags of the model's own checkpointing, so they are read after `disable`.
    switches = switches_of(model)
    try:
        yield
    finally:
        hook.disable(model)  # raises if somebody wrapped a forward meanwhile
        for switch in switches:
            switch.restore()
        for part, old, new in zip(parts, before, after, strict=True):
            now = part | {key: value for key, value in old.items() if new.get(key, old) is not value}
            part.clear()
            # In their order: the user may have hooks on both sides of fastac's.
            part.update({key: now[key] for key in [*old, *now] if key in now})
