"""compile and compile_attention: torch.compile in the composition that saves attention, also where graphs break.

A checkpoint inside compiled code is given up at a graph break (a router of experts, a print, a branch on data): the
block then runs eagerly, and nobody says so. Outside it, around a compiled block, it does not matter how many graphs
that has: the tape sees the attention calls of compiled code.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastac import hook, models
from fastac.backends import availability
from fastac.backends.verdicts import Verdict
from fastac.compile.flex import INDUCTOR, set_apart
from fastac.compile.torch_private import InductorWith
from fastac.engine import releases
from fastac.errors import FastacError, class_name
from fastac.policy import Policy

logger = logging.getLogger("fastac")


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
        counted = ", ".join(f"{name} x {count}" for name, count in self.blocks.items()) or "no block"
        made = f"{counted} compiled by {self.backend}, each inside its own checkpoint"
        lines = [f"{self.model}: {made} (policy {self.policy})."]
        if self.before:
            lines.append(f"{_few(self.before)} had been compiled before and stayed so, with the options they had.")
        if self.eager:
            lines.append(f"{_few(self.eager)} stayed eager: in compiled code their attention kernel could not be seen.")
        return " ".join(lines)


def compile(  # noqa: A001 it is called as fastac.compile, in the place of torch.compile
    model: torch.nn.Module,
    policy: str | Policy | Mapping[str, str | Policy] = "attn_only",
    *,
    blocks: str | torch.nn.Module | Iterable[str | torch.nn.Module] | None = None,
    determinism_check: str = "default",
    **options: Any,
) -> Compilation:
    """Enable fastac on a model and compile its blocks in place, each inside its own checkpoint.

    A second call changes what differs. `fastac.disable` leaves the blocks compiled. For a model without graph breaks,
    torch.compile(model, fullgraph=True) after `fastac.enable` gives the compiler more to fuse; whether that is faster,
    measure.

    Args:
        model: as in `fastac.enable`, which this calls.
        policy: as in `fastac.enable`.
        blocks: as in `fastac.enable`; left out, what it was given.
        determinism_check: as in `fastac.enable`.
        options: those of torch.compile, for every block.

    Returns:
        What was done; `print` it.

    Raises:
        FastacError: as `fastac.enable`. Nothing is changed then, nor where torch.compile does not take the options.

    Example:
        >>> print(fastac.compile(transformer, policy="attn_only"))
    """
    ready = _ready(options)
    hook.check_module(model, "compile")
    inner = models.unwrapped(model)
    blocks = hook.blocks_given(inner, blocks)
    hook.enable(model, policy, blocks=blocks, determinism_check=determinism_check)
    enabled = hook.enabled_on(inner)
    assert enabled is not None
    own = enabled.forwards
    found = {name: block for container in hook.containers_of(inner) for name, block in container.blocks.items()}
    before, eager = [], []
    for name, block in found.items():
        call = block._compiled_call_impl
        if any(use.verdict is Verdict.OPAQUE for use in availability.backend_uses(block)):
            eager.append(name)
        elif hasattr(block, "_orig_mod") or (call is not None and _options_of(call) is None):
            before.append(name)
        elif name not in own:
            if _options_of(call) != options:
                block.compile(**ready)
                block._compiled_call_impl._fastac_options = options  # type: ignore[union-attr]
        elif _options_of(own[name].before) != options:
            own[name].before = CompiledForward(block, own[name].forward, options, ready)
    made = Compilation(
        class_name(inner),
        str(enabled.policy),
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

    Args:
        function: what is compiled.
        options: those of torch.compile but for `backend`, which is inductor.

    Raises:
        FastacError: another backend, or a torch before 2.13.

    Example:
        >>> attend = fastac.compile_attention(flex_attention, dynamic=False)
    """
    releases.need(releases.FLEX, "Train with flex_attention as it is, in eager mode.")
    ready = _ready(options)
    if _name_of(ready["backend"]) != INDUCTOR:
        raise FastacError(
            f"compile_attention(backend={options['backend']!r}): it is about inductor, which hides flex_attention. "
            f"With another backend, use torch.compile."
        )
    return torch.compile(function, **ready)


def _ready(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with inductor as fastac has it. torch.compile says what it does not take, before a model changes."""
    torch.compile(_name_of, **options)
    ready = {**options, "backend": options.get("backend") or INDUCTOR}
    if ready["backend"] == INDUCTOR and releases.has(releases.FLEX):
        ready["backend"] = InductorWith(
            set_apart, ready.pop("mode", None), ready.pop("options", None), ready.get("dynamic")
        )
    return ready


def _name_of(backend: Any) -> str:
    name = backend if isinstance(backend, str) else getattr(backend, "compiler_name", None)
    return str(name or getattr(backend, "__name__", type(backend).__name__))


def _options_of(compiled: Any) -> dict[str, Any] | None:
    """With which options a call or a forward was compiled here; None where it was not."""
    return getattr(compiled, "_fastac_options", None)


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
        self._fastac_options = options
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
