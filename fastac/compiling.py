"""compile and compile_attention: torch.compile in the composition that saves attention, also where graphs break.

A checkpoint inside compiled code is given up at a graph break (a router of experts, a print, a branch on data): the
block then runs eagerly, and nobody says so. Outside it, around a compiled block, it does not matter how many graphs
that has: the tape sees the attention calls of compiled code.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastac import block_forward, block_selection, compiled_flex, hook, models, registry
from fastac.errors import FastacError
from fastac.policy import Policy
from fastac.ranks import class_name
from fastac.rows import Verdict

logger = logging.getLogger("fastac")

_OPTIONS = tuple(name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable"))


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What `fastac.compile` did with a model.

    blocks: how many of each class were compiled. before: names of others, that somebody else had compiled, with
    options of their own. eager: names of those that were left as they are, as their kernel can be seen in eager mode
    alone.
    """

    model: str
    policy: str
    backend: str
    blocks: Mapping[str, int]
    before: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()

    def __str__(self) -> str:
        counted = ", ".join(f"{name} x {count}" for name, count in self.blocks.items())
        lines = [
            f"{self.model}: {counted} compiled by {self.backend}, each inside its own checkpoint (policy "
            f"{self.policy}){', so that a graph break costs no saved attention' * (self.policy != 'full')}."
            if counted
            else f"{self.model}: no block was compiled here. Each is inside its own checkpoint (policy {self.policy})."
        ]
        if self.blocks and self.backend == compiled_flex.INDUCTOR:
            lines.append("flex_attention is compiled apart from what is around it, so that it can be saved.")
        if self.before:
            lines.append(
                f"{_few(self.before)} had been compiled before and stayed so, with the options they had: take out "
                f"compile_repeated_blocks() or block.compile() to have them compiled here."
            )
        if self.eager:
            lines.append(f"{_few(self.eager)} stayed eager: in compiled code their attention kernel could not be seen.")
        return " ".join(lines)


def compile(  # noqa: A001 it is called as fastac.compile, in the place of torch.compile
    model: torch.nn.Module,
    policy: str | Policy | Mapping[str, str | Policy] = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    **options: Any,
) -> Compilation:
    """Enable fastac on a model and compile its blocks in place, each inside its checkpoint.

    policy, blocks: as in `fastac.enable`, which this calls. options: those of torch.compile, for every block.
    Returns what was done; `print` it. A second call changes what differs. `fastac.disable` leaves the blocks compiled.
    For a model without graph breaks, torch.compile(model, fullgraph=True) after `fastac.enable` gives the compiler more
    to fuse; whether that is faster, measure.
    Raises what `enable` raises, and FastacError for an option that torch.compile does not have or take, and for a model
    that is compiled as a whole, or holds blocks (`blocks=...`) that are compiled already. Nothing is changed then.
    """
    hook.check_module(model, "compile")
    ready = _ready("compile", options)
    outer, inner = model, models.unwrapped(model)
    if blocks is None:
        hook.check_switch(inner, "compile")
    chosen = block_selection.select(inner, blocks, outer) if blocks is not None else hook.containers_of(inner)
    _refuse_compiled(outer, {block for container in chosen for block in container.blocks.values()}, blocks is not None)
    hook.enable(model, policy, blocks=blocks)
    own = block_forward.checkpointed(inner)
    found = {name: block for container in hook.containers_of(inner) for name, block in container.blocks.items()}
    before, eager = [], []
    for name, block in found.items():
        if _is_opaque(block):
            eager.append(name)
        elif hasattr(block, "_orig_mod") or _is_of_others(block):
            before.append(name)
        elif name not in own:
            _compile_call(block, options, ready)
        elif getattr(own[name].before, "options", None) != options:
            own[name].before = CompiledForward(block, own[name].forward, options, ready)
    setting = hook.setting_of(inner)
    made = Compilation(
        class_name(inner),
        str(setting.policy) if setting is not None else str(policy),
        _name_of(ready["backend"]),
        types.MappingProxyType(_count(block for name, block in found.items() if name not in (*eager, *before))),
        tuple(before),
        tuple(eager),
    )
    logger.info("%s", made)
    return made


def compile_attention(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile for a function that calls flex_attention, such as flex_attention itself, that lets it be saved.

    In a checkpointed block its kernel is a call that fastac sees, where torch.compile(flex_attention) hides it.
    options: those of torch.compile but for `backend`, which is inductor.
    Raises FastacError for an option that torch.compile does not have or take.
    """
    ready = _ready("compile_attention", options)
    if _name_of(ready["backend"]) != compiled_flex.INDUCTOR:
        raise FastacError(
            f"compile_attention(backend={options['backend']!r}): it is about inductor, which hides flex_attention. "
            f"With another backend, use torch.compile."
        )
    return torch.compile(function, **ready)


def _ready(call: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as torch.compile gets them. Raises FastacError for what it would not take."""
    if "engine" in options:
        raise FastacError(f"{call}(engine=...): torch's selective checkpointing can not stand around compiled code.")
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise FastacError(
            f"{call}({unknown[0]}=...): torch.compile has no such option. It has "
            f"{', '.join(_OPTIONS)}; those of inductor's configuration go into options={{...}}."
        )
    ready = dict(options)
    try:
        if ready.get("backend", compiled_flex.INDUCTOR) in (compiled_flex.INDUCTOR, None):
            if ready.get("mode") is not None and ready.get("options") is not None:
                raise RuntimeError("either mode or options can be given, not both")
            mode, inductors, dynamic = ready.pop("mode", None), ready.pop("options", None), ready.get("dynamic")
            ready["backend"] = compiled_flex.inductor(mode, inductors, dynamic)
        torch.compile(_nothing, **ready)
    except ImportError:
        raise  # of fastac's own, about this torch
    except Exception as error:
        words = str(error).partition(", known options")[0]
        raise FastacError(f"{call}: torch.compile does not take these options: {words}") from error
    return ready


def _nothing() -> None:
    pass


def _name_of(backend: Any) -> str:
    name = backend if isinstance(backend, str) else getattr(backend, "compiler_name", None)
    return str(name or getattr(backend, "__name__", type(backend).__name__))


def _refuse_compiled(model: torch.nn.Module, blocks: set[torch.nn.Module], named: bool) -> None:
    for module in model.modules():
        if module in blocks:
            if named and module._compiled_call_impl is not None:
                raise FastacError(
                    f"compile(blocks=...): a {class_name(module)} is compiled already, and would have its "
                    f"checkpoint inside. Do not call its compile(): fastac.compile does."
                )
            continue
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if compiled and not blocks.isdisjoint(module.modules()):
            raise FastacError(
                f"compile: {type(models.unwrapped(module)).__name__} is compiled as a whole already. Take out "
                f"model.compile() or torch.compile(model) before fastac.compile(model), which compiles its blocks; or "
                f"keep it, and call fastac.enable(model)."
            )


def _is_opaque(block: torch.nn.Module) -> bool:
    return any(use.verdict is Verdict.OPAQUE for use in registry.backend_uses(block))


_calls: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""Blocks whose call was compiled here: what torch made of it, and with which options."""


def _is_of_others(block: torch.nn.Module) -> bool:
    compiled, _ = _calls.get(block, (None, {}))
    return block._compiled_call_impl is not None and block._compiled_call_impl is not compiled


def _compile_call(block: torch.nn.Module, options: dict[str, Any], ready: dict[str, Any]) -> None:
    if block._compiled_call_impl is None or _calls[block][1] != options:
        block.compile(**ready)
        _calls[block] = block._compiled_call_impl, options


class CompiledForward:
    """A block's forward, compiled: what a checkpointed forward calls. A copy of the block is not compiled, as in torch.

    forward: the one that is compiled. It reads as the method of the block that it stands for.
    """

    __name__ = "forward"

    def __init__(
        self, block: torch.nn.Module, forward: Callable[..., Any], options: dict[str, Any], ready: dict[str, Any]
    ) -> None:
        own = forward._torchdynamo_orig_callable if isinstance(forward, CompiledForward) else forward
        self.__self__ = block
        self.options = options
        self._torchdynamo_orig_callable: Callable[..., Any] = own
        self._compiled = torch.compile(own, **ready)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _uncompiled, (self._torchdynamo_orig_callable,)


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _count(blocks: Iterable[torch.nn.Module]) -> dict[str, int]:
    """How many blocks there are of each class; one that stands in several places is one."""
    own = {id(block): type(getattr(block, "_orig_mod", block)).__name__ for block in blocks}
    return dict(collections.Counter(own.values()))


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
