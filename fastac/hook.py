"""enable and disable: make a model call `fastac.checkpoint` for its blocks.

A model calls it in one of three ways: by the gradient checkpointing function of diffusers' models, by the block's own
`forward`, or by the `checkpoint_fn` of a CheckpointWrapper around it (accelerate, torch). `Enabled` is an attribute of
the model, knows the state before, and is copied and pickled with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fastac import diagnosis, models
from fastac.backends.availability import check_backends, ignored_backends
from fastac.backends.plugins import prepare
from fastac.checkpointing import check_determinism, run
from fastac.compiled import graphs
from fastac.compiled.blocks import Compilation, compile_blocks
from fastac.diagnosis import out_of_memory
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.engine import checkpoint_wrappers, kinds, linear
from fastac.engine.blocks import BlockState, block_of, describe, is_inside, state_of
from fastac.engine.checkpoint_wrappers import inside, is_wrapper, wrappers_around
from fastac.errors import FastacError, PolicyNotAppliedError, class_name
from fastac.models import BlockContainer, grouped, select, without_wrappers
from fastac.policy import BlockPolicies, Policy, of_first, resolve, resolve_blocks, saves_nothing

logger = logging.getLogger("fastac")

_ENABLED = "_fastac"


@dataclasses.dataclass(eq=False)
class Forward:
    """A block whose own forward is checkpointed."""

    enabled: Enabled
    block: torch.nn.Module
    before: Callable[..., Any] | None
    """The attribute `forward` that the block had, None without one."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The block's forward before `enable`."""
        if self.before is not None:
            return self.before
        forward: Any = type(self.block).forward
        if torch.compiler.is_dynamo_compiling():  # which cannot trace `__get__` before torch 2.12
            return functools.partial(forward, self.block)
        return forward.__get__(self.block)  # type: ignore[no-any-return]

    @property
    def is_attached(self) -> bool:
        """Whether the block's forward opens a region."""
        forward = vars(self.block).get("forward")
        return isinstance(forward, functools.partial) and forward.func is _run_forward

    @property
    def is_wrapped(self) -> bool:
        """Whether it does so inside a hook that was put around it since."""
        forward = _inside_hook(vars(self.block).get("forward"))
        while forward is not None and getattr(forward, "func", None) is not _run_forward:
            forward = _inside_hook(forward)
        return forward is not None


def _inside_hook(forward: Any) -> Any:
    """The forward inside a hook, None without one."""
    inner = getattr(forward, "__wrapped__", None)
    for cell in getattr(inner, "__closure__", None) or ():  # diffusers before 0.40 wraps a function of its own
        if type(called := cell.cell_contents).__name__ == "HookFunctionReference":
            return called.original_forward or called.forward
    return inner


@dataclasses.dataclass(eq=False)
class Enabled:
    """How the blocks of one model are checkpointed, and its state before."""

    model: torch.nn.Module
    policy: Policy | BlockPolicies
    determinism_check: str
    blocks: dict[str, torch.nn.Module]
    """By qualified name, without wrappers."""
    by_forward: bool
    """Whether blocks are checkpointed in their own forward."""
    given: Any = None
    """`blocks` as `enable` got it."""
    forwards: dict[str, Forward] = dataclasses.field(default_factory=dict)
    """By name of the block, if `by_forward`."""
    switches: list[tuple[torch.nn.Module, Any, Any]] = dataclasses.field(default_factory=list)
    """Modules with the flag of gradient checkpointing; their flag and function before."""
    wrappers: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """CheckpointWrappers and their functions before."""
    input_grads: bool = False
    """Whether outputs of embeddings require grad since `enable`."""
    opened: int = 0
    """Regions of the forward that runs."""
    saved: bool = False
    """Whether some region saved something, or the policy saves nothing."""
    called: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    """Modules by qualified name that the model calls fastac for beside its blocks, such as parts of them."""

    def __post_init__(self) -> None:
        self.function = functools.partial(_run, self)  # for the model to call
        # Modules beside the blocks in the lists of these.
        self.others = {inside(one) for one in self._listed().values()} - set(self.blocks.values())
        self.known = set(self.blocks.values())
        self.saved = saves_nothing(self.policy)

    def checkpoint(self, function: Any, block: Any, args: Any, kwargs: Any) -> Any:
        """Checkpoint a call of a block by a function."""
        options = {"preserve_rng_state": True, "determinism_check": self.determinism_check, "early_stop": True}
        return run(function, args, kwargs, self.policy_of(block), options)

    def note(self, function: Any) -> None:
        """Note a module that is called and is none of the blocks: a UNet calls parts of its lists' members."""
        block = block_of(function)
        if block is not None and block not in self.known:
            self.known.add(block)
            self.called |= {name: block for name, module in self.model.named_modules() if inside(module) is block}

    def blocks_called(self) -> dict[str, torch.nn.Module]:
        """The blocks by qualified name; where the model calls modules in them or around them instead, these."""
        unseen = [name for name, block in self.blocks.items() if state_of(block).latest is None]
        called = {name: one for name, one in self.called.items() if _overlaps(name, unseen)}
        replaced = {name for name in unseen if _overlaps(name, called)}
        return {name: block for name, block in self.blocks.items() if name not in replaced} | called

    def policy_of(self, function: Any) -> Policy:
        """The policy of a block that is called: itself, by a bound method, or compiled."""
        if isinstance(self.policy, Policy):
            return self.policy
        block = inside(getattr(function, "__self__", function))
        policy = self.policy.get(getattr(block, "_orig_mod", block))
        if policy is None:
            raise FastacError(
                f"{describe(function)} is called under policies per block, and is no block that fastac.enable saw. If "
                f"it was replaced since, call fastac.enable again; else name the blocks: enable(model, blocks=...)."
            )
        return policy

    def policy_as_given(self) -> Policy | dict[str, Policy]:
        """The policy as `enable` takes it: by the names of the blocks where they differ."""
        if isinstance(self.policy, Policy):
            return self.policy
        return {name: self.policy_of(block) for name, block in self.blocks.items()}

    def attach(self) -> None:
        """Make the model call fastac for its blocks. Raises FastacError for a wrapper that cannot be taken over."""
        if not self.by_forward:
            self._attach_function()
        vars(self.model)[_ENABLED] = self
        for block in self.blocks.values():
            linear.attach(block, self.policy_of(block))
        if self.by_forward:
            for name, block in self.blocks.items():
                own = self.forwards.setdefault(name, Forward(self, block, vars(block).get("forward")))
                # by vars: a class may have a __setattr__ of its own
                vars(block)["forward"] = functools.partial(_run_forward, own)
            self._switch_on_transformers()
        blocks = set(self.blocks.values())
        for wrapper in [one for one in self.model.modules() if is_wrapper(one) and inside(one) in blocks]:
            self.take_over(wrapper)
        self.model.register_forward_pre_hook(self.before_forward)
        self.model.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        out_of_memory.watch_backward()

    def _switch_on_transformers(self) -> None:
        """Tell transformers and peft that blocks are checkpointed, as transformers' own switch does."""
        found = models.transformers_switches(self.model, set(self.blocks.values()))
        self.switches = list(map(models.switch_of, found))
        for module, _, _ in self.switches:
            models.set_switch(module, True, checkpoint_wrappers.call_plainly)
        variants = [one for module in self.model.modules() for one in getattr(module, "lora_variant", {}).values()]
        if self.switches and any("ALora" in class_name(one) for one in variants):
            # The hooks of activated LoRA end with the backward of a layer: without input gradients, before recompute.
            self.input_grads = not getattr(self.model, "_require_grads_hooks", ())
            if self.input_grads:
                self.model.enable_input_require_grads()  # type: ignore[operator]

    def _attach_function(self) -> None:
        """Give the model the function to call. Raises FastacError for a class that drops it."""
        model: Any = self.model
        self.switches = list(map(models.switch_of, models.switches(model)))
        with contextlib.suppress(TypeError):  # a class whose method takes no function
            model.enable_gradient_checkpointing(gradient_checkpointing_func=self.function)
        if any(is_ours(models.switch_function(one)) for one, _, _ in self.switches):
            return
        for module, flag, function in self.switches:
            models.set_switch(module, flag, function)
        raise FastacError(
            f"enable: {class_name(model)} drops the gradient checkpointing function that it is given: its forward "
            f"checkpoints by itself. {models.name_blocks(model, grouped(self.blocks))}"
        )

    def take_over(self, wrapper: Any) -> None:
        """Make a CheckpointWrapper around a block call fastac. Raises FastacError for one with options of its own."""
        if is_ours(wrapper.checkpoint_fn):
            return
        checkpoint_wrappers.check_default(wrapper, describe(inside(wrapper)))
        self.wrappers.append((wrapper, wrapper.checkpoint_fn))
        wrapper.checkpoint_fn = checkpoint_wrappers.call_plainly if self.by_forward else self.function

    def detach(self) -> None:
        """Leave the model as it was before `attach`. Raises FastacError where a forward was wrapped since."""
        for name, own in self.forwards.items():
            if own.is_wrapped:
                where = f"{class_name(self.model)}.{name}"
                raise FastacError(f"disable: the forward of {where} was wrapped since enable. Remove that hook first.")
        for own in self.forwards.values():
            if own.is_attached:  # else a hook from before `enable` was removed, and restored the forward of that time
                del vars(own.block)["forward"]
                if own.before is not None:
                    vars(own.block)["forward"] = own.before
        for module, flag, function in self.switches:
            if is_ours(models.switch_function(module)):  # another function stays
                models.set_switch(module, flag, function)
        if self.input_grads:
            self.model.disable_input_require_grads()  # type: ignore[operator]
        for wrapper, function in self.wrappers:
            wrapper.checkpoint_fn = function
        self.switches, self.wrappers = [], []
        for hooks in (self.model._forward_pre_hooks, self.model._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
        linear.detach(self.model)
        vars(self.model).pop(_ENABLED, None)

    def before_forward(self, model: torch.nn.Module, args: Any) -> None:
        """Count regions from here on: the model's forward begins. Raises PolicyNotAppliedError."""
        if not torch.compiler.is_compiling():
            self.opened = 0
            if self.by_forward and torch.is_grad_enabled() and self.was_replaced():
                self._refuse_second()

    def _refuse_second(self) -> None:
        """Raise PolicyNotAppliedError for the model's own checkpointing inside the blocks' forward.

        Only warn where the policy saves nothing: all is exact, and a reentrant one costs a third forward.
        """
        said = (
            f"{self.policy}: gradient checkpointing of {class_name(self.model)} was switched on after fastac.enable, "
            f"so its blocks are checkpointed twice. Switch it off: {_off(self.model)}."
        )
        if not saves_nothing(self.policy):
            raise PolicyNotAppliedError(said)
        functions = [models.switch_function(one) for one, _, _ in self.switches]
        if any(getattr(one, "keywords", {}).get("use_reentrant") for one in functions):
            kinds.warn_once(
                self.model, "reentrant", f"{said} It is reentrant: their forward runs three times in a step."
            )

    def after_forward(self, model: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """Raise PolicyNotAppliedError if the model ran, with gradients on, and opened no region or saved nothing."""
        if outputs is None and not torch.compiler.is_compiling() and (error := sys.exc_info()[1]) is not None:
            out_of_memory.explain(error)
            return
        if not torch.is_grad_enabled() or saves_nothing(self.policy):
            return
        replaced = self.was_replaced()
        if torch.compiler.is_compiling() and not replaced:
            return
        if self.by_forward:
            self._check_attached()
        if self.opened and not replaced:
            self.check_saved()
        # Regions in a graph that torch.compile made are not seen to open.
        elif replaced or not (self.was_switched_off() or graphs.hold_regions(nodes_between(outputs, (args, kwargs)))):
            cause = "its forward checkpoints by itself, or it calls other modules"
            way_out = models.name_blocks(model, grouped(self.blocks))
            if replaced:
                cause, way_out = "its gradient checkpointing function was replaced", "Call fastac.enable after that."
            elif self.by_forward:
                cause = "gradients are off in them (reentrant checkpointing, no_grad), or it calls other modules"
                way_out = "Leave the model's own checkpointing off, or pass use_reentrant=False to it. Else name what "
                way_out += f"it calls: blocks=... {models.module_lists(model)}"
            raise PolicyNotAppliedError(
                f"{self.policy}: {class_name(model)} ran with gradients on, and called fastac for none of its "
                f"{len(self.blocks)} blocks ({next(iter(self.blocks))!r}, ...): {cause}.\n{way_out}"
            )

    def _check_attached(self) -> None:
        """Raise PolicyNotAppliedError for a block that is new since `enable`, or whose forward was replaced."""
        attached = {own.block for own in self.forwards.values() if own.is_attached or own.is_wrapped} | self.others
        now = self._listed()
        for name in self.forwards.keys() - now.keys():
            with contextlib.suppress(AttributeError):  # taken out, as for a stage of a pipeline
                now[name] = self.model.get_submodule(name)
        for name, block in now.items():
            if inside(block) not in attached and models.unwrapped(inside(block)) not in attached:
                raise PolicyNotAppliedError(
                    f"{self.policy}: {class_name(self.model)}.{name} ({class_name(block)}) ran without checkpointing: "
                    f"the block is new, or its forward was replaced since fastac.enable. Call fastac.enable again."
                )

    def _listed(self) -> dict[str, torch.nn.Module]:
        """The modules that are now in the lists of the blocks, by name."""
        found: dict[str, torch.nn.Module] = {}
        for name in {name.rpartition(".")[0] for name in self.blocks}:
            with contextlib.suppress(AttributeError):  # it is inside a wrapper
                inner = self.model.get_submodule(name)
                if isinstance(inner, models.LISTS):
                    found |= {f"{name}.{key}".lstrip("."): one for key, one in inner.named_children()}
        return found

    def check_once_all_ran(self) -> None:
        """`check_saved` for a trainer that calls the blocks itself, and no forward of the model."""
        if all(state_of(block).latest or self.policy_of(block).saves_nothing for block in self.blocks.values()):
            self.check_saved()

    def check_saved(self) -> None:
        """Raise PolicyNotAppliedError if nothing was saved in any block."""
        if self.saved:
            return
        policies = {block: self.policy_of(block) for block in self.blocks.values()}
        ran = {block for block in policies if state_of(block).latest}
        for container in grouped(self.blocks) if self.by_forward and ran else ():
            if not any(one in ran or policies[one].saves_nothing for one in container.blocks.values()):
                remark = f"{class_name(self.model)}: none of the blocks in {container.name!r} was called"
                kinds.warn_once(self.model, remark, remark)
        self.saved = diagnosis.judge_model(self.model, str(self.policy), policies)

    def was_switched_off(self) -> bool:
        """Whether the model's gradient checkpointing, which calls fastac, is off now."""
        return bool(self.switches) and not (
            self.by_forward or any(module.gradient_checkpointing for module, _, _ in self.switches)
        )

    def was_replaced(self) -> bool:
        """Whether gradient checkpointing is on with another function."""
        return _is_another_on(module for module, _, _ in self.switches)


def _overlaps(name: str, others: Iterable[str]) -> bool:
    """Whether a module is in one of the others or around it."""
    return any(is_inside(name, other) or is_inside(other, name) for other in others)


def _run(enabled: Enabled, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The function that a model calls for a block. A CheckpointWrapper does not pass its options on to it."""
    if not torch.compiler.is_compiling():
        enabled.opened += 1
        enabled.note(function)
    around = list(wrappers_around(function)) if inside(function) is not function else ()
    for wrapper in around:  # they may be newer than `enable`
        enabled.take_over(wrapper)
    if around:
        return function(*args, **kwargs)  # it calls us, for the module inside it
    return enabled.checkpoint(function, function, args, kwargs)


def _run_forward(own: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces a block's forward."""
    if not torch.is_grad_enabled():
        return own.forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        own.enabled.opened += 1
    if own.block._compiled_call_impl is not None:
        raise FastacError(
            f"{describe(own.block)}: block.compile() compiles around its checkpoint, and torch runs that eagerly. "
            f"Use fastac.compile(model, blocks=...) instead of block.compile() and fastac.enable."
        )
    # By the block: dynamo does not know the object that a method is bound to.
    outputs = own.enabled.checkpoint(own.forward, own.block, args, kwargs)
    if not (torch.compiler.is_compiling() or own.enabled.saved):
        own.enabled.check_once_all_ran()
    return outputs


def enable(
    model: torch.nn.Module,
    policy: str | Policy | Mapping[str, str | Policy] = "attn_only",
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
            (the first match counts), with "none" for blocks that are not to be checkpointed.
        blocks: for any other model: the dotted name of a module list whose members are the blocks, or of one block; a
            module instead of a name; several of these. Their `forward` is checkpointed; state-dict keys stay. By
            default those of the previous `enable`; else the only module list whose members hold attention, or are
            equal.
        determinism_check: "default" compares recompute with the forward, as `checkpoint` does; "none" only counts the
            tensors that are saved.

    Raises:
        UnsupportedBackendError: the attention backend of a module cannot be honoured. The model is left as it was.
        FastacError: a model without gradient checkpointing or blocks, an unknown policy, a name in `linear` that no
            block has, or blocks that are checkpointed already. The model is left as it was.

    Example:
        >>> fastac.enable(transformer, policy="long_attn_only")
    """
    outer, model = model, check_module(model, "enable")
    check_determinism("enable", determinism_check)
    if models.is_by_forward(model, None):  # else the model may be its own host
        blocks = blocks_given(model, blocks)
    if isinstance(blocks, Iterable) and not isinstance(blocks, (str, torch.nn.Module)):
        blocks = list(blocks)
    by_forward = models.is_by_forward(model, blocks)
    containers = choose_blocks(model, blocks, outer)
    if by_forward:
        _refuse_own(model)
    named = {name: block for container in containers for name, block in container.blocks.items()}
    if isinstance(policy, Mapping) and not by_forward and len(models.switches(model)) > 1:
        # A UNet checkpoints modules beside the blocks in its lists: a plan has their names.
        named |= {name: module for name, module in model.named_modules() if name in policy}
    selected = resolve_blocks(policy, named) if isinstance(policy, Mapping) else resolve(policy)
    prepare()
    check_backends(model, named, selected)
    enabled = Enabled(model, selected, determinism_check, named, by_forward, blocks)
    policies = {block: enabled.policy_of(block) for block in named.values()}
    linear.check_names(model, policies, are_guessed=not by_forward and models.row_of(model) is None)
    before = enabled_on(model)
    disable(model)
    try:
        enabled.attach()
    except FastacError:
        enabled.detach()
        if before is not None:
            before.attach()
        raise
    offloading = sum(bool(enabled.policy_of(block).offload) for block in named.values())
    for name, block in named.items():
        vars(state_of(block)).update(vars(BlockState(f"{class_name(model)}.{name}", offloading)))
        kinds.forget_kinds(block)  # regions of its class are observed anew
    logger.info("%s: policy %s, %d blocks", class_name(model), selected, len(named))
    for remark in ignored_backends(model, named):
        kinds.warn_once(model, remark, f"{class_name(model)}: {remark}")


def compile(  # noqa: A001 it is called as fastac.compile, in the place of torch.compile
    model: torch.nn.Module,
    policy: str | Policy | Mapping[str, str | Policy] = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    determinism_check: str = "default",
    **options: Any,
) -> Compilation:
    """Enable fastac on a model and compile its blocks in place, each inside its own checkpoint.

    A second call compiles blocks again whose options differ. `fastac.disable` leaves the blocks compiled. For a model
    without graph breaks, torch.compile(model, fullgraph=True) after `fastac.enable` gives the compiler more to fuse:
    measure whether that is faster.

    Args:
        model: as in `fastac.enable`, which this calls.
        policy: as in `fastac.enable`.
        blocks: as in `fastac.enable`; by default the `blocks` that it was given.
        determinism_check: as in `fastac.enable`.
        options: options of torch.compile, for every block.

    Returns:
        A `Compilation`, to be printed: the blocks that are compiled, and those that are not.

    Raises:
        FastacError: as `fastac.enable`. The model is left as it was, also where torch.compile refuses an option.

    Example:
        >>> print(fastac.compile(transformer, policy="attn_only"))
    """
    torch.compile(check_module, **options)  # raises for an unknown option
    inner = check_module(model, "compile")
    enable(model, policy, blocks=blocks_given(inner, blocks), determinism_check=determinism_check)
    enabled = vars(inner)[_ENABLED]
    made = compile_blocks(inner, str(enabled.policy), enabled.blocks, enabled.forwards, options)
    logger.info("%s", made)
    return made


def first_blocks(
    model: torch.nn.Module, count: int, policy: str | Policy = "attn_only", *, blocks: Any = None
) -> dict[str, str | Policy]:
    """The policies that checkpoint the first blocks of a model, and not its last ones.

    Backward comes to the last blocks first: the memory that autograd keeps of them is free again before a recompute
    needs it.

    Args:
        model, blocks: as in `enable`.
        count: number of blocks that are checkpointed, of those in all of its containers.
        policy: of these blocks.

    Returns:
        Block name -> policy, "none" for the rest, for `enable`, `compile` and `verify`.

    Raises:
        FastacError: unknown blocks, or fewer than `count`.

    Example:
        >>> fastac.enable(transformer, fastac.first_blocks(transformer, 20))
    """
    outer, model = model, check_module(model, "first_blocks")
    enabled = enabled_on(model)
    containers = grouped(enabled.blocks) if enabled and blocks is None else choose_blocks(model, blocks, outer)
    return of_first([name for container in containers for name in container.blocks], count, policy)


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: restore the model's gradient checkpointing as it was before. Does nothing without `enable`.

    Raises:
        FastacError: the argument is no module, or a block's forward was wrapped since.
    """
    for module in check_module(model, "disable").modules():
        if (enabled := enabled_on(module)) is not None:
            enabled.detach()


def enabled_on(model: torch.nn.Module) -> Enabled | None:
    """The state of an enabled model, None without `enable`."""
    return vars(model).get(_ENABLED)


def check_no_part(model: torch.nn.Module, call: str) -> None:
    """Raise FastacError for a model of which only parts are enabled."""
    parts = [name for name, module in model.named_modules() if enabled_on(module) is not None]
    if parts and "" not in parts:
        raise FastacError(
            f"{call}: fastac is enabled on a part of {class_name(model)}, not on the whole of it. Pass that part: "
            f"{call}(model.{parts[0]}, ...)."
        )


def containers_of(model: torch.nn.Module) -> list[BlockContainer]:
    """The containers of a model's blocks, enabled or not: of those that it calls fastac for, once it did."""
    enabled = enabled_on(model)
    if enabled is not None:
        return grouped(enabled.blocks_called())
    return without_wrappers(models.containers(model, models.row_of(model)))


def is_ours(function: object) -> bool:
    """Whether a gradient checkpointing function is one that `enable` sets."""
    return function is checkpoint_wrappers.call_plainly or (
        isinstance(function, functools.partial) and function.func is _run
    )


def check_module(model: object, call: str) -> torch.nn.Module:
    """The model inside its wrappers. Raises FastacError for an argument of a public function, `call`, that is none."""
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"{call}: expected a model, got {type(model).__name__}. With a pipeline, pass its transformer: "
            f"{call}(pipe.transformer)."
        )
    return models.unwrapped(model)


@contextlib.contextmanager
def checkpointing_preserved(model: torch.nn.Module) -> Iterator[None]:
    """Restore the checkpointing of a model at the end, fastac's own or not."""
    enabled = enabled_on(model)
    disable(model)
    flags = list(map(models.switch_of, models.switches(model)))
    try:
        yield
    finally:
        disable(model)
        for module, flag, function in flags:
            models.set_switch(module, flag, function)
        if enabled is not None:
            enabled.attach()


def _is_another_on(modules: Iterable[Any]) -> bool:
    """Whether gradient checkpointing of some modules is on with a function that is not fastac's."""
    return any(one.gradient_checkpointing and not is_ours(models.switch_function(one)) for one in modules)


def choose_blocks(model: torch.nn.Module, blocks: Any, outer: torch.nn.Module) -> list[BlockContainer]:
    """The containers of a model's blocks, as `enable` takes `blocks`. Raises FastacError for an ambiguous model."""
    if blocks is not None:
        return select(model, blocks, outer)
    found = without_wrappers(models.containers(model, models.row_of(model)))
    if found and not models.is_by_forward(model, blocks):
        return found
    possible = models.possible_containers(model)
    # Without attention in a name, equal blocks may call it themselves: the first region shows whether they do.
    taken = found or [one for one in possible if len(set(map(type, one.blocks.values()))) == 1]
    if len(taken) != 1 or len(possible) != 1:
        some = f"{len(possible)} module lists whose members may be its blocks" if taken else "no list of attention"
        raise FastacError(f"{class_name(model)} has {some}. {models.name_blocks(model, possible)}")
    logger.info("%s: took the blocks in %r, the only list of them", class_name(model), taken[0].name)
    return select(model, taken[0].name, outer)


def blocks_given(model: torch.nn.Module, blocks: Any) -> Any:
    """The `blocks` of a call; by default those of the previous `enable`."""
    enabled = enabled_on(model)
    return enabled.given if blocks is None and enabled is not None else blocks


def _refuse_own(model: torch.nn.Module) -> None:
    """Raise FastacError where the model's own gradient checkpointing is on, or was before `enable`."""
    enabled = enabled_on(model)
    was_on = enabled is not None and any(flag for _, flag, _ in enabled.switches)
    if was_on or _is_another_on(models.switches(model)):
        raise FastacError(
            f"gradient checkpointing of {class_name(model)} is on already, so its blocks would be checkpointed twice. "
            f"Switch it off first: {_off(model)}."
        )


def _off(model: torch.nn.Module) -> str:
    # transformers has both of the last two until its version 6
    names = ("disable_gradient_checkpointing", "activation_checkpointing_disable", "gradient_checkpointing_disable")
    off = next((f"model.{name}()" for name in names if hasattr(model, name)), "gradient_checkpointing = False")
    by_trainer = " (a Trainer of transformers switches it on: set TrainingArguments(gradient_checkpointing=False))"
    return off + by_trainer * hasattr(model, "gradient_checkpointing_enable")
