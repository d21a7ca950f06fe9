"""enable and disable: make a model call `fastac.checkpoint` for its blocks.

`enable` finds the blocks, checks their attention backends, and puts an `Enabled` on the model: the policy of each
block, the hosts by which the model calls fastac (hosts.py), and hooks on the model's forward, which see whether regions
opened and saved something. `Enabled` is an attribute of the model, so it is copied and pickled with the model.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fastac.backends import check_backends, ignored_backends
from fastac.backends.plugins import prepare
from fastac.checkpointing import check_determinism
from fastac.compiled import graphs
from fastac.compiled.blocks import Compilation, compile_blocks
from fastac.diagnosis import every_step, out_of_memory
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.engine import kinds, linear
from fastac.engine.blocks import BlockState, describe, inside, is_compiled, state_of
from fastac.engine.process import thread
from fastac.errors import FastacError, PolicyNotAppliedError, class_name
from fastac.hosts import ENABLED, ForwardHost, FunctionHost, blocks_given, detach_all, refuse_second
from fastac.models import MODELS
from fastac.models.blocks import by_list, check_module, choose_blocks
from fastac.models.switches import is_by_forward, switches_of
from fastac.planning.auto import Auto, Choice, Planner, no_memory
from fastac.policy import (
    DISABLED,
    NAMED,
    AnyPolicy,
    BlockPolicies,
    Policy,
    of_first,
    resolve,
    resolve_blocks,
)

logger = logging.getLogger("fastac")


GivenPolicy = AnyPolicy | Auto | Planner
"""What `enable` takes for a policy. A Planner is that of an earlier `enable`, with its choices."""


@dataclasses.dataclass(eq=False)
class Enabled:
    """What `enable` puts on a model. `attach` and `detach` may follow each other any number of times."""

    model: torch.nn.Module
    policy: Policy | BlockPolicies
    determinism_check: str
    blocks: dict[str, torch.nn.Module]
    """The blocks inside their wrappers, by qualified name."""
    given: Any = None
    """The argument `blocks` of `enable`."""
    planner: Planner | None = None
    """Under policy "auto": it chooses `policy` when a forward begins."""
    opened: int = 0
    """The number of regions that the running forward of the model has opened; under "full", of calls that it made."""
    saved: bool = False
    """Whether some region saved something, or the policy saves nothing."""

    def __post_init__(self) -> None:
        self.options = {"preserve_rng_state": True, "determinism_check": self.determinism_check, "early_stop": True}
        host_class: Any = ForwardHost if is_by_forward(self.model, self.given) else FunctionHost
        self.host: FunctionHost | ForwardHost = host_class(self)

    def policy_of(self, function: Any) -> Policy:
        """The policy of a block. function: what is called: the block, a bound method of it, or the compiled block."""
        if isinstance(self.policy, Policy):
            return self.policy
        policy = self.policy.of(inside(getattr(function, "__self__", function)))
        if policy is None:
            raise FastacError(
                f"{describe(function)} is called under policies per block, and fastac.enable did not see it as a "
                f"block. If it was replaced since, call fastac.enable again; else name the blocks: enable(model, "
                f"blocks=...)."
            )
        return policy

    @property
    def policy_name(self) -> str:
        """The policy in words."""
        return str(self.policy) if self.planner is None else "auto"

    def attach(self) -> None:
        """Make the model call fastac for its blocks. Raises FastacError if a host or a Linear module refuses."""
        self.host.attach()
        vars(self.model)[ENABLED] = self  # past __setattr__, which a class may define in its own way
        self.apply()
        self.model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        self.model.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        out_of_memory.watch_backward()

    def detach(self) -> None:
        """Leave the model as it was before `attach`. Raises FastacError if a forward was wrapped since."""
        self.host.detach()  # first: it raises before anything has changed
        # Found by their owner: torch's handle of a hook would not be valid in a copied or unpickled model.
        dicts = [value for name, value in vars(self.model).items() if name.startswith("_forward_") and "hooks" in name]
        for key in [key for hooks in dicts for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
            for hooks in dicts:
                hooks.pop(key, None)
        linear.detach(self.model)
        vars(self.model).pop(ENABLED, None)

    def before_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The model's forward begins: count its regions, and choose. Raises as `after_forward`, or NothingFitsError."""
        if torch.compiler.is_compiling():
            return
        self.opened = 0
        if not torch.is_grad_enabled():
            return
        if not self.host.is_replaced:
            if self.planner is not None and self.host.is_on:
                choice = self.planner.before_forward(self, args, kwargs)
                if choice is not None:
                    self.take(choice)
        elif self.host.forwards:
            said = f"{self.policy}: {class_name(model)}: {self.host.why_no_region()[0]}."
            if self.policy.is_selective:
                raise PolicyNotAppliedError(said)
            # It is exact.
            if any(getattr(switch.function, "keywords", {}).get("use_reentrant") for switch in self.host.switches):
                kinds.warn_once(model, "reentrant", f"{said} It is reentrant: their forward runs three times.")

    def saves_linear(self) -> bool:
        """Whether the blocks can save outputs of Linear modules: compiled ones cannot."""
        forwards = [replaced.forward for replaced in self.host.forwards.values()]
        return not any(map(is_compiled, [*self.blocks.values(), *forwards]))

    def take(self, choice: Choice) -> None:
        """Give the blocks the policies of a choice."""
        if isinstance(choice.policies, Policy):
            self.policy = choice.policies
        else:
            # A UNet calls parts of its blocks, and the plan names these.
            modules = {name: inside(self.model.get_submodule(name)) for name in choice.policies} | self.blocks
            self.policy = BlockPolicies(
                (getattr(module, "_orig_mod", module), choice.policies.get(name, NAMED["full"]))
                for name, module in modules.items()
            )
        for replaced in self.host.forwards.values():
            replaced.policy = self.policy_of(replaced.block)
        self.apply(attaches=not choice.is_measured)
        self.saved |= choice.is_measured

    def apply(self, attaches: bool = True) -> None:
        """Tell the blocks what their policies need. Raises FastacError if a Linear module refuses.

        attaches: Linear modules get the hooks that name them. If not, regions put them on.
        """
        offloading = sum(bool(self.policy_of(block).offload) for block in self.blocks.values())
        for block in (*self.blocks.values(), *self.host.called.values()):
            state_of(block).latest = state_of(block).transfers = None  # they belong to the policy before this one
        for block in self.blocks.values():
            state_of(block).offloading = offloading
            if attaches:
                linear.attach(block, self.policy_of(block))
        self.saved = not self.policy.is_selective

    def after_forward(self, model: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """Raise PolicyNotAppliedError if the model ran, with gradients on, and opened no region or saved nothing."""
        # torch calls this hook (always_call) after an error as well, without outputs.
        compiling, replaced = torch.compiler.is_compiling(), self.host.is_replaced
        if outputs is None and not compiling and (error := sys.exc_info()[1]) is not None:
            if out_of_memory.explain(error) and self.planner is not None and torch.is_grad_enabled():
                self.planner.ran_out()
            thread.measurement = None
            return
        if not torch.is_grad_enabled():
            return
        if self.planner is not None and not compiling:
            self.planner.after_forward(outputs)
        # The model's own checkpointing is exact, and does all that a policy does which saves nothing.
        if (compiling and not replaced) or (replaced and not self.policy.is_selective):
            return
        new = self.host.new_blocks()
        if self.opened and not new and not replaced:
            self.check_saved()
            return
        # Regions inside a compiled graph run no Python of ours: the graph's nodes in the outputs' history show them.
        missed = replaced or (self.host.is_on and not graphs.has_regions(nodes_between(outputs, (args, kwargs))))
        if not (new or missed) or str(self.policy) == "none":
            return
        for name, block in new.items():
            raise PolicyNotAppliedError(
                f"{self.policy}: {class_name(model)}.{name} ({class_name(block)}) is new, or its forward was replaced "
                f"since fastac.enable, so it may run without checkpointing. Call fastac.enable again."
            )
        cause, way_out = self.host.why_no_region()
        raise PolicyNotAppliedError(
            f"{self.policy}: {class_name(model)} ran with gradients on, and called fastac for none of its "
            f"{len(self.blocks)} blocks ({next(iter(self.blocks))!r}, ...): {cause}.\n{way_out}"
        )

    def check_once_all_ran(self) -> None:
        """Call `check_saved` once all blocks ran: a trainer may call the blocks itself, without the model's forward."""
        if self.planner is not None and self.planner.latest is None:
            said = "only its blocks are called, not its forward, and a choice needs the inputs of the forward"
            kinds.warn_once(self.model, "auto", f'policy "auto": {class_name(self.model)}: {said}, so "attn_only"')
        if all(state_of(block).latest or not self.policy_of(block).is_selective for block in self.blocks.values()):
            self.check_saved()

    def check_saved(self) -> None:
        """Raise PolicyNotAppliedError if blocks ran and nothing was saved in any of them."""
        if self.saved:
            return
        # A UNet calls parts of its blocks. If none has attention, none is recomputed, and "attn_only" asks for no more.
        parts = [*self.host.called.values()]
        if all(self.policy_of(part).saves(0) and not getattr(state_of(part).latest, "calls", ()) for part in parts):
            parts = []
        policies = {block: self.policy_of(block) for block in (*self.blocks.values(), *parts)}
        ran = {block for block in policies if state_of(block).latest}
        # Blocks with a replaced forward are called each by itself. Under a policy that saves nothing they leave no
        # result, so they are not seen to run.
        for name, blocks in by_list(self.blocks).items() if self.host.forwards and ran else ():
            if not any(block in ran or not policies[block].is_selective for block in blocks.values()):
                remark = f"{class_name(self.model)}: none of the blocks in {name!r} was called"
                kinds.warn_once(self.model, remark, remark)
        self.saved = every_step.judge_model(self.model, str(self.policy), policies)


def enable(
    model: torch.nn.Module,
    policy: GivenPolicy = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    determinism_check: str = "default",
) -> None:
    """Checkpoint a model's blocks, saving what `policy` names and recomputing the rest.

    Takes the place of `model.enable_gradient_checkpointing()` on a diffusers model.

    Args:
        model: a diffusers model, or any module with `blocks`. May be inside DistributedDataParallel, FSDP,
            torch.compile's OptimizedModule or a PeftModel.
        policy: "attn_only", "long_attn_only", "full", a fastac.Policy, or a mapping of block-name patterns to these
            (the first match counts), with "none" for blocks that are not to be checkpointed. "auto", or a fastac.Auto,
            measures the first step, and chooses the fastest that fits the device for the next ones.
        blocks: for any other model: the dotted name of a module list whose members are the blocks, or of one block; a
            module instead of a name; several of these. Their `forward` is checkpointed; state-dict keys stay. The
            default is the `blocks` of the previous `enable`, or else the model's only module list whose members hold
            attention or are all of one class.
        determinism_check: "default" compares recompute with the forward, as `checkpoint` does; "none" only counts the
            tensors that are saved.

    Raises:
        UnsupportedBackendError: the attention backend of a module cannot be honoured. The model is left as it was.
        FastacError: a model without gradient checkpointing or blocks, an unknown policy, a name in `linear` that no
            block has, or blocks that are checkpointed already. The model is left as it was.

    Example:
        >>> fastac.enable(transformer, policy="long_attn_only")
    """
    outer, model = model, check_module(model, "enable")  # `blocks` may be named as in either of them
    check_determinism("enable", determinism_check)
    # A diffusers model that was once enabled with blocks=... goes back to its own function without them.
    if is_by_forward(model, None):
        blocks = blocks_given(model, blocks)
    if isinstance(blocks, Iterable) and not isinstance(blocks, (str, torch.nn.Module)):
        blocks = list(blocks)  # a generator could not be given to the next `enable`
    by_forward = is_by_forward(model, blocks)
    named = choose_blocks(model, blocks, outer)
    before = enabled_on(model)
    policy, planner = _planned(policy)
    if by_forward:
        refuse_second(model, None if before is None else before.host)
    if isinstance(policy, Mapping) and not by_forward and len(switches_of(model)) > 1:
        # A UNet checkpoints parts of the blocks in its lists, and a plan for it names these parts.
        named |= {name: module for name, module in model.named_modules() if name in policy}
    selected = resolve_blocks(policy, named) if isinstance(policy, Mapping) else resolve(policy)
    # The check below asks which ops this process has.
    prepare()
    check_backends(model, named, selected)
    enabled = Enabled(model, selected, determinism_check, named, blocks, planner)
    policies = {block: enabled.policy_of(block) for block in named.values()}
    linear.check_names(model, policies, are_guessed=not by_forward and class_name(model) not in MODELS)
    # Everything that can be refused without a change to the model was refused above.
    disable(model)
    try:
        enabled.attach()
    except FastacError:
        # A host refused, for example a CheckpointWrapper with options. Leave the model as it was, enabled or not.
        enabled.detach()
        if before is not None:
            before.attach()
        raise
    for name, block in named.items():
        # The object stays, because regions whose backward is still to come hold it.
        state = state_of(block)
        named_state = BlockState(
            f"{class_name(model)}.{name}", state.offloading, state.block, is_auto=planner is not None
        )
        vars(state).update(vars(named_state))
        kinds.forget_kinds(block)  # the next regions of its class are first ones, and are observed
    if planner is not None and planner.latest is not None:
        enabled.take(planner.latest)
    logger.info("%s: policy %s, %d blocks", class_name(model), enabled.policy_name, len(named))
    for remark in ignored_backends(model, named):
        kinds.warn_once(model, remark, f"{class_name(model)}: {remark}")


def _planned(policy: GivenPolicy) -> tuple[AnyPolicy, Planner | None]:
    """The policy before the first forward, and the planner that chooses others then; no planner if there is no "auto".

    Raises FastacError if the device does not say how much memory it has.
    """
    if policy == "auto":
        policy = Auto()
    if isinstance(policy, Auto):
        policy = Planner(policy)
    if not isinstance(policy, Planner):
        return policy, None
    if DISABLED:
        return "attn_only", None
    if policy.auto.memory is None and not torch.accelerator.is_available():
        raise no_memory()
    return "attn_only", policy


def compile(  # noqa: A001 it is called as fastac.compile, in the place of torch.compile
    model: torch.nn.Module,
    policy: GivenPolicy = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    determinism_check: str = "default",
    **options: Any,
) -> Compilation:
    """Enable fastac on a model and compile its blocks in place, each inside its own checkpoint.

    A second call compiles blocks again if the options differ. `fastac.disable` leaves the blocks compiled. If a model
    has no graph breaks, torch.compile(model, fullgraph=True) after `fastac.enable` gives the compiler more to fuse:
    measure whether that is faster.

    Args:
        model: as in `fastac.enable`, which this calls.
        policy: as in `fastac.enable`.
        blocks: as in `fastac.enable`; by default those of the previous `enable`.
        determinism_check: as in `fastac.enable`.
        options: options of torch.compile, for every block.

    Returns:
        A `Compilation`, to be printed: which blocks are compiled, and which are not.

    Raises:
        FastacError: as `fastac.enable`. The model is left as it was, also if torch.compile refuses an option.

    Example:
        >>> print(fastac.compile(transformer, policy="attn_only"))
    """
    torch.compile(check_module, **options)  # raises for an unknown option, before the model is changed
    inner = check_module(model, "compile")
    enable(model, policy, blocks=blocks_given(inner, blocks), determinism_check=determinism_check)
    enabled = vars(inner)[ENABLED]
    compilation = compile_blocks(inner, enabled.policy_name, enabled.blocks, enabled.host.forwards, options)
    logger.info("%s", compilation)
    return compilation


def first_blocks(
    model: torch.nn.Module, count: int, policy: str | Policy = "attn_only", *, blocks: Any = None
) -> dict[str, str | Policy]:
    """The policies that checkpoint the first blocks of a model, and not its last ones.

    Backward begins with the last blocks. The memory that autograd holds for them is free again before the first
    recompute needs it.

    Args:
        model, blocks: as in `enable`.
        count: how many blocks are checkpointed, counted over all lists.
        policy: the policy of these blocks.

    Returns:
        Block name -> policy, "none" for the rest, for `enable`, `compile` and `verify`.

    Raises:
        FastacError: unknown blocks, or fewer than `count`.

    Example:
        >>> fastac.enable(transformer, fastac.first_blocks(transformer, 20))
    """
    outer, model = model, check_module(model, "first_blocks")
    enabled = enabled_on(model)
    chosen = enabled.blocks if enabled and blocks is None else choose_blocks(model, blocks, outer)
    return of_first([*chosen], count, policy)


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: restore the model's gradient checkpointing as it was before. Does nothing without `enable`.

    Raises:
        FastacError: the argument is not a module, or a block's forward was wrapped since.
    """
    detach_all(check_module(model, "disable"))


def enabled_on(model: torch.nn.Module) -> Enabled | None:
    """The `Enabled` of a model; None if it is not enabled."""
    return vars(model).get(ENABLED)


def plan_in_words(model: torch.nn.Module) -> str:
    """What policy "auto" chose for a model's latest forward, in a line; "" if that is not its policy."""
    enabled = enabled_on(model)
    if enabled is None or enabled.planner is None:
        return ""
    return enabled.planner.latest.why if enabled.planner.latest else "nothing was planned yet"
