"""Three ways in which a model calls fastac for a block, and what each of them replaces.

- `FunctionHost`: a diffusers model calls its gradient checkpointing function, and we give it ours.
- `ForwardHost`: in any other model, we replace the `forward` of each block.
- A CheckpointWrapper around a block (accelerate, torch) calls its `checkpoint_fn`, and both hosts replace that as well.

A host knows what it replaced, and is copied and pickled with the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastac.checkpointing import run
from fastac.engine import linear
from fastac.engine.blocks import block_of, describe, inside, is_inside, state_of
from fastac.engine.checkpoint_wrappers import call_plainly, check_default, is_wrapper, wrappers_around
from fastac.errors import FastacError, class_name
from fastac.models.blocks import LISTS, by_list, module_lists, name_blocks, unwrapped
from fastac.models.switches import Switch, switches_of, transformers_switches
from fastac.policy import Policy

ENABLED = "_fastac"
"""The attribute of a model that holds its `Enabled`."""


class EnabledReference:
    """Leads from a block to the `Enabled` of its model, which sets it again in a copied or unpickled model.

    It is all that a block holds of its model: a block that is copied without the model has a reference to nothing.
    """

    enabled: Any = None

    def __reduce__(self) -> Any:
        return EnabledReference, ()


def detach_all(model: torch.nn.Module) -> None:
    """Undo `enable` on a model and its parts. Raises FastacError if a block's forward was wrapped since."""
    # A part of the model may be what was enabled.
    for module in model.modules():
        if (enabled := vars(module).get(ENABLED)) is not None:
            enabled.detach()
    # What is left came with copies of parts of other models.
    for module in model.modules():
        replaced = _forward_of(module)
        if replaced and not ((owner := replaced.reference.enabled) and module in owner.blocks.values()):
            replaced.detach()
            linear.detach(module)
        for name, value in vars(module).items():
            if is_ours(value) and value is not call_plainly and value.args[0].enabled is None:
                vars(module)[name] = call_plainly


def blocks_given(model: torch.nn.Module, blocks: Any) -> Any:
    """The argument `blocks` of a call; by default that of the previous `enable`."""
    enabled = vars(model).get(ENABLED)
    return enabled.given if blocks is None and enabled is not None else blocks


class Host:
    """What `FunctionHost` and `ForwardHost` have in common. `Enabled` has one of them."""

    def __init__(self, enabled: Any) -> None:
        self.enabled, self.model, self.blocks = enabled, enabled.model, enabled.blocks
        self.reference = EnabledReference()
        self.reference.enabled = enabled
        # By default it does nothing but call the block, whose own forward is checkpointed already.
        self.function: Callable[..., Any] = call_plainly
        """The function that we give to modules with gradient checkpointing, and to CheckpointWrappers."""
        self.switches: list[Switch] = []
        """The flag and function of each of these modules, as they were before `attach`."""
        self.called: dict[str, torch.nn.Module] = {}
        """By qualified name, other modules than the blocks that the model calls fastac for, as parts of blocks."""
        self.forwards: dict[str, Forward] = {}
        """By the block's qualified name, the forwards that are replaced."""
        self.wrappers: list[tuple[Any, Any]] = []
        """Each CheckpointWrapper that was taken over, with the function that it had."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.reference.enabled = self.enabled

    def attach(self) -> None:
        """Take over the CheckpointWrappers around blocks. Raises FastacError as `take_over`."""
        blocks = set(self.blocks.values())
        for module in self.model.modules():
            if is_wrapper(module) and inside(module) in blocks:
                self.take_over(module)

    def take_over(self, wrapper: Any) -> None:
        """Make a CheckpointWrapper call our function. Raises FastacError if it has options other than torch's."""
        if wrapper.checkpoint_fn is self.function:  # taken over before
            return
        if not is_ours(wrapper.checkpoint_fn):
            check_default(wrapper, describe(inside(wrapper)))
        self.wrappers.append((wrapper, wrapper.checkpoint_fn))
        wrapper.checkpoint_fn = self.function

    def detach(self) -> None:
        """Leave the model as it was before `attach`."""
        for wrapper, function in self.wrappers:
            wrapper.checkpoint_fn = function
        for switch in self.switches:
            # If somebody set another function since, that is what the user wants now: it stays.
            if is_ours(switch.function):
                switch.restore()
        self.switches, self.wrappers = [], []

    @property
    def is_on(self) -> bool:
        """Whether checkpointing that calls fastac is on. A replaced forward has no switch: it always calls fastac."""
        return bool(self.forwards) or any(switch.is_on for switch in self.switches)

    @property
    def is_replaced(self) -> bool:
        """Whether gradient checkpointing is on with a function that is not ours."""
        return is_another_on(self.switches)

    @property
    def is_active(self) -> bool:
        """Whether the model calls fastac for all of its blocks."""
        return self.is_on and not self.is_replaced and not self.new_blocks()

    def new_blocks(self) -> dict[str, torch.nn.Module]:
        """By name, the blocks that are new since `enable`, or whose forward was replaced."""
        return {}

    def blocks_called(self) -> dict[str, torch.nn.Module]:
        """The blocks by qualified name. A block that was not called gives way to called modules in it or around it."""
        unseen = [name for name, block in self.blocks.items() if state_of(block).latest is None]
        called = {name: module for name, module in self.called.items() if _overlaps(name, unseen)}
        replaced = {name for name in unseen if _overlaps(name, called)}
        return {name: block for name, block in self.blocks.items() if name not in replaced} | called


def _overlaps(name: str, others: Iterable[str]) -> bool:
    """Whether a module is one of the others, inside one of them, or around one."""
    return any(is_inside(name, other) or is_inside(other, name) for other in others)


class FunctionHost(Host):
    """The gradient checkpointing function of a diffusers model. The model calls it as function(block, *inputs)."""

    def __init__(self, enabled: Any) -> None:
        super().__init__(enabled)
        self.function = functools.partial(_run_function, self.reference)
        self.noted = set(self.blocks.values())
        """The blocks, and the modules in `called`."""

    def attach(self) -> None:
        """Give the model the function to call. Raises FastacError for a class that drops it."""
        model: Any = self.model
        self.switches = switches_of(model)
        with contextlib.suppress(TypeError):  # a class whose method takes no function
            model.enable_gradient_checkpointing(gradient_checkpointing_func=self.function)
        if not any(is_ours(switch.function) for switch in self.switches):
            for switch in self.switches:
                switch.restore()
            raise FastacError(
                f"enable: {class_name(model)} drops the gradient checkpointing function that it is given: its forward "
                f"checkpoints by itself. {name_blocks(model, by_list(self.blocks))}"
            )
        super().attach()

    def why_no_region(self) -> tuple[str, str]:
        """The cause, and a way out, if the model's forward opened no region."""
        if self.is_replaced:
            cause = "model.enable_gradient_checkpointing() or a trainer replaced fastac's function since"
            return cause, "Leave that call out, or call fastac.enable again after it."
        cause = "its forward checkpoints by itself, or it calls other modules"
        return cause, name_blocks(self.model, by_list(self.blocks))

    def note(self, function: Any) -> None:
        """Note a called module that is not one of the blocks: a UNet checkpoints the resnets and attentions in them."""
        block = block_of(function)
        if block is not None and block not in self.noted:
            called = {name: block for name, module in self.model.named_modules() if inside(module) is block}
            self.called |= called
            self.noted.update(called.values())  # not a module of a copied model: it would stay in memory


def _run_function(reference: EnabledReference, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The function that a model or a CheckpointWrapper calls for a block.

    `is_ours` recognises it in a functools.partial.
    """
    enabled = reference.enabled
    if enabled is None:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        raise FastacError(
            f"{describe(function)} was copied without the model that fastac.enable was called on, and has no policy. "
            f"Call fastac.enable on the model that it is in now, or fastac.disable."
        )
    if not torch.compiler.is_compiling():
        enabled.opened += 1
        enabled.host.note(function)
    around = list(wrappers_around(function)) if inside(function) is not function else ()
    for wrapper in around:  # somebody may have wrapped the block after `enable`
        enabled.host.take_over(wrapper)
    if around:
        # The wrapper calls this function again, for the block inside it. A region here would checkpoint it twice.
        return function(*args, **kwargs)
    return run(function, args, kwargs, enabled.policy_of(function), enabled.options)


class Forward:
    """A block whose own forward is checkpointed."""

    def __init__(self, enabled: Any, block: torch.nn.Module) -> None:
        self.reference, self.options, self.block = enabled.host.reference, enabled.options, block
        self.policy: Policy = enabled.policy_of(block)
        self.before: Callable[..., Any] | None = vars(block).get("forward")
        """The block's own attribute `forward` before `enable`; None if only its class has one."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The block's forward before `enable`, as a bound method."""
        if self.before is not None:
            return self.before
        forward: Any = type(self.block).forward
        if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace `__get__` before torch 2.12
            return functools.partial(forward, self.block)
        return forward.__get__(self.block)  # type: ignore[no-any-return]

    def attach(self) -> None:
        """Make the block's forward open a region."""
        # Past __setattr__, which a class may define in its own way.
        vars(self.block)["forward"] = functools.partial(_run_forward, self)

    def detach(self) -> None:
        """Give the block its forward back."""
        # If it is not attached, a hook from before `enable` was removed since, and restored the forward of that time.
        if _forward_of(self.block) is not None:
            del vars(self.block)["forward"]
            if self.before is not None:
                vars(self.block)["forward"] = self.before

    @property
    def is_wrapped(self) -> bool:
        """Whether the forward that opens a region is inside a hook that was put around it since."""
        forward = _inside_hook(vars(self.block).get("forward"))
        while forward is not None and getattr(forward, "func", None) is not _run_forward:
            forward = _inside_hook(forward)
        return forward is not None


def _forward_of(module: torch.nn.Module) -> Forward | None:
    """What replaced the forward of a module; None if nothing did, or a hook was put around that since."""
    forward = vars(module).get("forward")
    if not isinstance(forward, functools.partial) or forward.func is not _run_forward:
        return None
    replaced: Forward = forward.args[0]
    if replaced.block is not module and isinstance(module, type(replaced.block)):
        # A shallow copy (copy.copy, torch.nn.DataParallel) has the attributes of the block, and may have other weights.
        replaced = copy.copy(replaced)
        replaced.block = module
        if hasattr(replaced.before, "_torchdynamo_orig_callable"):
            replaced.before = None  # it is compiled, and runs the block
        replaced.attach()
    return replaced


def _inside_hook(forward: Any) -> Any:
    """The forward inside a hook of diffusers or accelerate; None if it is not a hook."""
    inner = getattr(forward, "__wrapped__", None)
    # Before diffusers 0.40, __wrapped__ is not the inner forward but a closure over it (huggingface/diffusers#14285).
    for cell in getattr(inner, "__closure__", None) or ():
        if type(called := cell.cell_contents).__name__ == "HookFunctionReference":
            return called.original_forward or called.forward
    return inner


class ForwardHost(Host):
    """The `forward` of each block, if the model takes no function or `enable` was given the blocks."""

    def __init__(self, enabled: Any) -> None:
        super().__init__(enabled)
        self.others = {inside(module) for module in self._listed().values()} - set(self.blocks.values())
        """Other modules in the lists that hold the blocks: `blocks` may name some members of a list."""

    def attach(self) -> None:
        """Replace the forward of each block, and tell transformers and peft that blocks are checkpointed."""
        for name, block in self.blocks.items():
            # A Forward from an earlier `attach` may hold the compiled forward of `fastac.compile`: keep it.
            self.forwards.setdefault(name, Forward(self.enabled, block)).attach()
        # These get a function that only calls the block: its forward is the checkpoint.
        self.switches = transformers_switches(self.model, set(self.blocks.values()))
        for switch in self.switches:
            switch.set(True, self.function)
        super().attach()

    def detach(self) -> None:
        """Leave the model as it was before `attach`. Raises FastacError if a forward was wrapped since."""
        # Taking our forward out of the middle of somebody's hook is not possible, and the hook would keep it alive.
        for name, replaced in self.forwards.items():
            if replaced.is_wrapped:
                where = f"{class_name(self.model)}.{name}"
                raise FastacError(f"disable: the forward of {where} was wrapped since enable. Remove that hook first.")
        for replaced in self.forwards.values():
            replaced.detach()
        super().detach()

    def why_no_region(self) -> tuple[str, str]:
        """The cause, and a way out, if the model's forward opened no region, or its own checkpointing is on."""
        if self.is_replaced:
            said = "gradient checkpointing was switched on after fastac.enable, so its blocks are checkpointed twice"
            return f"{said}. Switch it off: {_off(self.model)}", ""
        return (
            "gradients are off in them (reentrant checkpointing, no_grad), or it calls other modules",
            "Leave the model's own checkpointing off, or pass use_reentrant=False to it. Else name what it calls: "
            f"blocks=... {module_lists(self.model)}",
        )

    def new_blocks(self) -> dict[str, torch.nn.Module]:
        """By name, the blocks that are new since `enable`, or whose forward was replaced."""
        known = self.others | {
            item.block for item in self.forwards.values() if _forward_of(item.block) or item.is_wrapped
        }
        listed = self._listed()
        for name in self.forwards.keys() - listed.keys():
            with contextlib.suppress(AttributeError):  # the block was taken out, as for a stage of a pipeline
                listed[name] = self.model.get_submodule(name)
        # torch.compile puts an OptimizedModule around a block, so look inside it as well.
        return {name: at for name, at in listed.items() if known.isdisjoint((inside(at), unwrapped(inside(at))))}

    def _listed(self) -> dict[str, torch.nn.Module]:
        """The modules that are now in the lists of the blocks, by name."""
        listed: dict[str, torch.nn.Module] = {}
        for name in {name.rpartition(".")[0] for name in self.blocks}:
            with contextlib.suppress(AttributeError):  # the list is inside a wrapper, which its name leaves out
                inner = self.model.get_submodule(name)
                if isinstance(inner, LISTS):
                    listed |= {f"{name}.{key}".lstrip("."): module for key, module in inner.named_children()}
        return listed


def _run_forward(replaced: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """The function that replaces a block's forward. `_forward_of` recognises it in a functools.partial."""
    # The caller says which module is called: a shallow copy of the block has the block's `forward`. Frames of others
    # than torch are not read, since reading them would keep their tensors alive.
    if not torch.compiler.is_dynamo_compiling() and (caller := sys._getframe(1)).f_globals is _TORCH_MODULE:
        replaced = _forward_of(caller.f_locals.get("self", replaced.block)) or replaced
    # A block that was copied without its model is checkpointed, and nobody counts its calls.
    enabled = None if torch.compiler.is_compiling() else replaced.reference.enabled
    if enabled is not None and (torch.is_grad_enabled() or not replaced.policy.is_selective):
        enabled.opened += 1  # without gradients: a reentrant checkpoint around it, which is exact
    if not torch.is_grad_enabled():
        return replaced.forward(*args, **kwargs)
    # torch compiles the call of a module around its forward, so around the region: it would fall back to eager code.
    if replaced.block._compiled_call_impl is not None:
        raise FastacError(
            f"{describe(replaced.block)}: block.compile() compiles around its checkpoint, and torch runs that eagerly. "
            f"Use fastac.compile(model, blocks=...) instead of block.compile() and fastac.enable."
        )
    # The policy is that of the block, not looked up by the forward: dynamo does not know what a method is bound to.
    outputs = run(replaced.forward, args, kwargs, replaced.policy, replaced.options)
    if enabled is not None and not enabled.saved:
        enabled.check_once_all_ran()
    return outputs


_TORCH_MODULE = vars(torch.nn.modules.module)
"""The globals of torch's code that calls the forward of a module."""


def is_ours(function: object) -> bool:
    """Whether a gradient checkpointing function was set by a host."""
    return function is call_plainly or (isinstance(function, functools.partial) and function.func is _run_function)


def is_another_on(switches: Iterable[Switch]) -> bool:
    """Whether gradient checkpointing of some module is on with a function that is not fastac's."""
    return any(switch.is_on and not is_ours(switch.function) for switch in switches)


def refuse_second(model: torch.nn.Module, before: Host | None) -> None:
    """Raise FastacError if the model's own gradient checkpointing is on.

    before: the host of an earlier `enable`. It knows whether checkpointing was on before that.
    """
    was_on = before is not None and any(switch.flag for switch in before.switches)
    if was_on or is_another_on(switches_of(model)):
        raise FastacError(
            f"gradient checkpointing of {class_name(model)} is on already, so its blocks would be checkpointed twice. "
            f"Switch it off first: {_off(model)}."
        )


def _off(model: torch.nn.Module) -> str:
    """How to switch off a model's gradient checkpointing."""
    # transformers has both of the last two names until its version 6, which drops the last one.
    names = ("disable_gradient_checkpointing", "activation_checkpointing_disable", "gradient_checkpointing_disable")
    off = next((f"model.{name}()" for name in names if hasattr(model, name)), "gradient_checkpointing = False")
    by_trainer = " (a Trainer of transformers switches it on: set TrainingArguments(gradient_checkpointing=False))"
    return off + by_trainer * hasattr(model, "gradient_checkpointing_enable")
