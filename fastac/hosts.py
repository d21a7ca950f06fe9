"""Three ways in which a model calls fastac for a block, and what each of them replaces.

- `FunctionHost`: a diffusers model calls its gradient checkpointing function, and we give it ours.
- `ForwardHost`: of any other model, we replace the `forward` of the blocks.
- `WrapperHost`: a CheckpointWrapper around a block (accelerate, torch) calls its `checkpoint_fn`, and we replace that,
  beside one of the other two.

A host knows what it replaced, and is copied and pickled with the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from fastac.checkpointing import run
from fastac.engine import kinds
from fastac.engine.blocks import block_of, describe, is_inside, state_of
from fastac.engine.checkpoint_wrappers import call_plainly, check_default, inside, is_wrapper, wrappers_around
from fastac.errors import FastacError, PolicyNotAppliedError, class_name
from fastac.models.blocks import LISTS, grouped, module_lists, name_blocks, unwrapped
from fastac.models.switches import Switch, switches_of, transformers_switches
from fastac.policy import BlockPolicies, Policy, saves_nothing

_REPLACED = "its gradient checkpointing function was replaced", "Call fastac.enable after that."


class Owner(Protocol):
    """What a host needs of the `Enabled` of its model, which stands above it."""

    model: torch.nn.Module
    policy: Policy | BlockPolicies
    blocks: dict[str, torch.nn.Module]
    options: dict[str, Any]
    wrappers: WrapperHost
    opened: int
    saved: bool

    def check_once_all_ran(self) -> None:
        """Raise PolicyNotAppliedError if every block ran and none of them saved anything."""


def policy_of(policy: Policy | BlockPolicies, function: Any) -> Policy:
    """The policy of a block that is called: itself, by a bound method, or compiled."""
    if isinstance(policy, Policy):
        return policy
    block = inside(getattr(function, "__self__", function))
    found = policy.get(getattr(block, "_orig_mod", block))
    if found is None:
        raise FastacError(
            f"{describe(function)} is called under policies per block, and is no block that fastac.enable saw. If "
            f"it was replaced since, call fastac.enable again; else name the blocks: enable(model, blocks=...)."
        )
    return found


class Host:
    """How a model calls fastac for its blocks: by a function that it is given, or by their own forward."""

    calls_every_block = True
    """Whether each block is called by itself. Otherwise the model may call parts of it instead, as a UNet does."""

    def __init__(self, enabled: Owner) -> None:
        self.enabled, self.model, self.blocks = enabled, enabled.model, enabled.blocks
        self.function: Callable[..., Any] = call_plainly
        """What modules with the flag of gradient checkpointing call, and CheckpointWrappers around a block."""
        self.switches: list[Switch] = []
        """Those of these modules."""
        self.called: dict[str, torch.nn.Module] = {}
        """Modules by qualified name that the model calls fastac for beside its blocks, such as parts of them."""
        self.forwards: dict[str, Forward] = {}
        """The blocks whose own forward is replaced, by name."""

    def detach(self) -> None:
        """Leave the model as it was before `attach`."""
        for switch in self.switches:
            if is_ours(switch.function):  # another function stays
                switch.restore()
        self.switches = []

    @property
    def is_on(self) -> bool:
        """Whether the gradient checkpointing that calls fastac is on."""
        return True

    @property
    def is_replaced(self) -> bool:
        """Whether gradient checkpointing is on with a function that is not ours."""
        return is_another_on(self.switches)

    def before_forward(self) -> None:
        """The model's forward begins, with gradients on."""

    def after_forward(self) -> None:
        """The model's forward has ended, with gradients on."""

    def blocks_called(self) -> dict[str, torch.nn.Module]:
        """The blocks by qualified name; where the model calls modules in them or around them instead, these."""
        unseen = [name for name, block in self.blocks.items() if state_of(block).latest is None]
        called = {name: module for name, module in self.called.items() if _overlaps(name, unseen)}
        replaced = {name for name in unseen if _overlaps(name, called)}
        return {name: block for name, block in self.blocks.items() if name not in replaced} | called


def _overlaps(name: str, others: Iterable[str]) -> bool:
    """Whether a module is in one of the others or around it."""
    return any(is_inside(name, other) or is_inside(other, name) for other in others)


class FunctionHost(Host):
    """The gradient checkpointing function of a diffusers model, which it calls as function(block, *inputs)."""

    calls_every_block = False

    def __init__(self, enabled: Owner) -> None:
        super().__init__(enabled)
        self.function = functools.partial(_run_function, self)
        self.known = set(self.blocks.values())
        """Blocks, and modules in `called`."""

    def attach(self) -> None:
        """Give the model the function to call. Raises FastacError for a class that drops it."""
        model: Any = self.model
        self.switches = switches_of(model)
        with contextlib.suppress(TypeError):  # a class whose method takes no function
            model.enable_gradient_checkpointing(gradient_checkpointing_func=self.function)
        if any(is_ours(switch.function) for switch in self.switches):
            return
        for switch in self.switches:
            switch.restore()
        raise FastacError(
            f"enable: {class_name(model)} drops the gradient checkpointing function that it is given: its forward "
            f"checkpoints by itself. {name_blocks(model, grouped(self.blocks))}"
        )

    @property
    def is_on(self) -> bool:
        """Whether the model's flag of gradient checkpointing is on."""
        return any(switch.is_on for switch in self.switches)

    def why_no_region(self) -> tuple[str, str]:
        """The cause, and a way out, if the model's forward opened no region."""
        cause = "its forward checkpoints by itself, or it calls other modules"
        return _REPLACED if self.is_replaced else (cause, name_blocks(self.model, grouped(self.blocks)))

    def note(self, function: Any) -> None:
        """Note a module that is called and is none of the blocks: a UNet calls parts of its lists' members."""
        block = block_of(function)
        if block is not None and block not in self.known:
            self.known.add(block)
            self.called |= {name: block for name, module in self.model.named_modules() if inside(module) is block}


def _run_function(host: FunctionHost, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The function that a model calls for a block. A CheckpointWrapper does not pass its options on to it."""
    enabled = host.enabled
    if not torch.compiler.is_compiling():
        enabled.opened += 1
        host.note(function)
    around = list(wrappers_around(function)) if inside(function) is not function else ()
    for wrapper in around:  # they may be newer than `enable`
        enabled.wrappers.take_over(wrapper)
    if around:
        return function(*args, **kwargs)  # it calls us, for the module inside it
    return run(function, args, kwargs, policy_of(enabled.policy, function), enabled.options)


class Forward:
    """A block whose own forward is checkpointed."""

    def __init__(self, enabled: Owner, block: torch.nn.Module) -> None:
        self.enabled, self.block = enabled, block
        self.policy = policy_of(enabled.policy, block)
        self.before: Callable[..., Any] | None = vars(block).get("forward")
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

    def attach(self) -> None:
        """Make the block's forward open a region."""
        vars(self.block)["forward"] = functools.partial(_run_forward, self)  # its class may have a __setattr__

    def detach(self) -> None:
        """Give the block its forward back."""
        if self.is_attached:  # else a hook from before `enable` was removed, and restored the forward of that time
            del vars(self.block)["forward"]
            if self.before is not None:
                vars(self.block)["forward"] = self.before

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


class ForwardHost(Host):
    """The `forward` of each block, for a model that takes no function, or whose blocks are named."""

    def __init__(self, enabled: Owner) -> None:
        super().__init__(enabled)
        self.others = {inside(module) for module in self._listed().values()} - set(self.blocks.values())
        """Modules beside the blocks in the lists of these."""
        self.input_grads = False
        """Whether outputs of embeddings require grad since `attach`."""

    def attach(self) -> None:
        """Replace the forward of each block, and tell transformers and peft that blocks are checkpointed."""
        for name, block in self.blocks.items():
            self.forwards.setdefault(name, Forward(self.enabled, block)).attach()
        self.switches = transformers_switches(self.model, set(self.blocks.values()))
        for switch in self.switches:
            switch.set(True, self.function)
        variants = [
            variant for module in self.model.modules() for variant in getattr(module, "lora_variant", {}).values()
        ]
        if self.switches and any("ALora" in class_name(variant) for variant in variants):
            # The hooks of activated LoRA end with the backward of a layer: without input gradients, before recompute.
            self.input_grads = not getattr(self.model, "_require_grads_hooks", ())
            if self.input_grads:
                self.model.enable_input_require_grads()  # type: ignore[operator]

    def detach(self) -> None:
        """Leave the model as it was before `attach`. Raises FastacError if a forward was wrapped since."""
        for name, replaced in self.forwards.items():
            if replaced.is_wrapped:
                where = f"{class_name(self.model)}.{name}"
                raise FastacError(f"disable: the forward of {where} was wrapped since enable. Remove that hook first.")
        for replaced in self.forwards.values():
            replaced.detach()
        if self.input_grads:
            self.model.disable_input_require_grads()  # type: ignore[operator]
        super().detach()

    def why_no_region(self) -> tuple[str, str]:
        """The cause, and a way out, if the model's forward opened no region."""
        return (
            _REPLACED
            if self.is_replaced
            else (
                "gradients are off in them (reentrant checkpointing, no_grad), or it calls other modules",
                "Leave the model's own checkpointing off, or pass use_reentrant=False to it. Else name what it calls: "
                f"blocks=... {module_lists(self.model)}",
            )
        )

    def before_forward(self) -> None:
        """Raise PolicyNotAppliedError for the model's own checkpointing inside the blocks' forward.

        Only warn where the policy saves nothing: all is exact, and a reentrant one costs a third forward.
        """
        if not self.is_replaced:
            return
        said = (
            f"{self.enabled.policy}: gradient checkpointing of {class_name(self.model)} was switched on after "
            f"fastac.enable, so its blocks are checkpointed twice. Switch it off: {_off(self.model)}."
        )
        if not saves_nothing(self.enabled.policy):
            raise PolicyNotAppliedError(said)
        if any(getattr(switch.function, "keywords", {}).get("use_reentrant") for switch in self.switches):
            said += " It is reentrant: their forward runs three times in a step."
            kinds.warn_once(self.model, "reentrant", said)

    def after_forward(self) -> None:
        """Raise PolicyNotAppliedError for a block that is new since `enable`, or whose forward was replaced."""
        forwards = self.forwards.values()
        attached = {replaced.block for replaced in forwards if replaced.is_attached or replaced.is_wrapped}
        now = self._listed()
        for name in self.forwards.keys() - now.keys():
            with contextlib.suppress(AttributeError):  # taken out, as for a stage of a pipeline
                now[name] = self.model.get_submodule(name)
        for name, block in now.items():
            if {inside(block), unwrapped(inside(block))}.isdisjoint(attached | self.others):
                raise PolicyNotAppliedError(
                    f"{self.enabled.policy}: {class_name(self.model)}.{name} ({class_name(block)}) ran without "
                    f"checkpointing: the block is new, or its forward was replaced since fastac.enable. Call "
                    f"fastac.enable again."
                )

    def _listed(self) -> dict[str, torch.nn.Module]:
        """The modules that are now in the lists of the blocks, by name."""
        found: dict[str, torch.nn.Module] = {}
        for name in {name.rpartition(".")[0] for name in self.blocks}:
            with contextlib.suppress(AttributeError):  # it is inside a wrapper
                inner = self.model.get_submodule(name)
                if isinstance(inner, LISTS):
                    found |= {f"{name}.{key}".lstrip("."): module for key, module in inner.named_children()}
        return found


def _run_forward(replaced: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces a block's forward."""
    if not torch.is_grad_enabled():
        return replaced.forward(*args, **kwargs)
    enabled, block = replaced.enabled, replaced.block
    if block._compiled_call_impl is not None:
        raise FastacError(
            f"{describe(block)}: block.compile() compiles around its checkpoint, and torch runs that eagerly. "
            f"Use fastac.compile(model, blocks=...) instead of block.compile() and fastac.enable."
        )
    if torch.compiler.is_compiling():
        return run(replaced.forward, args, kwargs, replaced.policy, enabled.options)
    enabled.opened += 1
    outputs = run(replaced.forward, args, kwargs, replaced.policy, enabled.options)
    if not enabled.saved:
        enabled.check_once_all_ran()
    return outputs


class WrapperHost:
    """The CheckpointWrappers around blocks: their `checkpoint_fn`, beside the host by which the model calls us."""

    def __init__(self, enabled: Owner, function: Callable[..., Any]) -> None:
        self.model, self.blocks, self.function = enabled.model, set(enabled.blocks.values()), function
        self.before: list[tuple[Any, Any]] = []
        """Wrappers and their functions before."""

    def attach(self) -> None:
        """Take over the wrappers around blocks. Raises FastacError as `take_over`."""
        for wrapper in [module for module in self.model.modules() if is_wrapper(module)]:
            if inside(wrapper) in self.blocks:
                self.take_over(wrapper)

    def take_over(self, wrapper: Any) -> None:
        """Make a CheckpointWrapper around a block call fastac. Raises FastacError for one with options of its own."""
        if is_ours(wrapper.checkpoint_fn):
            return
        check_default(wrapper, describe(inside(wrapper)))
        self.before.append((wrapper, wrapper.checkpoint_fn))
        wrapper.checkpoint_fn = self.function

    def detach(self) -> None:
        """Give the wrappers their functions back."""
        for wrapper, function in self.before:
            wrapper.checkpoint_fn = function
        self.before = []


def is_ours(function: object) -> bool:
    """Whether a gradient checkpointing function is one that a host sets."""
    return function is call_plainly or (isinstance(function, functools.partial) and function.func is _run_function)


def is_another_on(switches: Iterable[Switch]) -> bool:
    """Whether gradient checkpointing of some module is on with a function that is not fastac's."""
    return any(switch.is_on and not is_ours(switch.function) for switch in switches)


def refuse_second(model: torch.nn.Module, before: Host | None) -> None:
    """Raise FastacError if the model's own gradient checkpointing is on, or was before `enable` (before: its host)."""
    was_on = before is not None and any(switch.flag for switch in before.switches)
    if was_on or is_another_on(switches_of(model)):
        raise FastacError(
            f"gradient checkpointing of {class_name(model)} is on already, so its blocks would be checkpointed twice. "
            f"Switch it off first: {_off(model)}."
        )


def _off(model: torch.nn.Module) -> str:
    """How to switch off a model's gradient checkpointing."""
    # transformers has both of the last two until its version 6
    names = ("disable_gradient_checkpointing", "activation_checkpointing_disable", "gradient_checkpointing_disable")
    off = next((f"model.{name}()" for name in names if hasattr(model, name)), "gradient_checkpointing = False")
    by_trainer = " (a Trainer of transformers switches it on: set TrainingArguments(gradient_checkpointing=False))"
    return off + by_trainer * hasattr(model, "gradient_checkpointing_enable")
