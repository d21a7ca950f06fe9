"""torch.compile in the composition that saves attention even if graphs break: `fastac.compile` and its options.

dynamo gives up a checkpoint inside compiled code at a graph break (a router of experts, a print, a branch on data). The
block then runs eagerly, without a warning. For a checkpoint around a compiled block it does not matter how many graphs
the block has: the tape sees the attention calls of compiled code.
"""

# pytorch#193143 (open) makes compile(checkpoint(f)) with a graph break into checkpoint(compile(f)), as is done here. By
# its review it does not keep a selective policy.

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from fastac.backends import backend_uses
from fastac.backends.verdicts import Verdict
from fastac.compiled.flex import INDUCTOR, set_apart
from fastac.compiled.torch_private import InductorWith
from fastac.engine import releases
from fastac.errors import class_name

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The blocks of a model that `fastac.compile` compiled, and those that it did not."""

    model: str
    policy: str
    backend: str
    blocks: Mapping[str, int]
    """Class -> the number of its blocks that are compiled."""
    before: tuple[str, ...] = ()
    """Names of blocks that were compiled by somebody else, with other options."""
    eager: tuple[str, ...] = ()
    """Names of blocks that are not compiled: only eager mode shows their attention kernel."""

    def __str__(self) -> str:
        counted = ", ".join(f"{name} x {count}" for name, count in self.blocks.items()) or "no block"
        compiled = f"{counted} compiled by {self.backend}, each inside its own checkpoint"
        lines = [f"{self.model}: {compiled} (policy {self.policy})."]
        if self.before:
            lines.append(f"{_few(self.before)} had been compiled before and stayed so, with the options they had.")
        if self.eager:
            lines.append(f"{_few(self.eager)} stayed eager: in compiled code their attention kernel could not be seen.")
        return " ".join(lines)


def compile_blocks(
    model: torch.nn.Module,
    policy: str,
    blocks: Mapping[str, torch.nn.Module],
    forwards: Mapping[str, Any],
    options: dict[str, Any],
) -> Compilation:
    """Compile the blocks of an enabled model in place, each inside its own checkpoint.

    Args:
        model, policy: for the result.
        blocks: name -> block.
        forwards: block name -> its `hook.Forward`, if the block's own forward is checkpointed.
        options: the options of torch.compile.
    """
    ready = _ready(options)
    compiled, earlier, eager = [], [], []
    for name, block in blocks.items():
        # `Module.compile` leaves the compiled call in this attribute, and torch has no public way to ask for it.
        call, replaced = block._compiled_call_impl, forwards.get(name)
        if any(use.found.verdict is Verdict.OPAQUE for use in backend_uses(block)):
            eager.append(name)
        elif hasattr(block, "_orig_mod") or (call is not None and _options_of(call) is None):
            earlier.append(name)
        else:
            compiled.append(block)
            # To compile anew with equal options would throw away compiled code.
            if replaced is None and _options_of(call) != options:
                block.compile(**ready)
                block._compiled_call_impl._fastac_options = options  # type: ignore[union-attr]
            elif replaced is not None and _options_of(replaced.before) != options:
                replaced.before = CompiledForward(block, replaced.forward, options, ready)
    counts = dict(collections.Counter(map(class_name, dict.fromkeys(compiled))))  # a block in two places counts once
    return Compilation(class_name(model), policy, _name_of(ready["backend"]), counts, tuple(earlier), tuple(eager))


def compile_attention(function: Callable[_Parameters, _Result], **options: Any) -> Callable[_Parameters, _Result]:
    """torch.compile for flex_attention, or a function that calls it, so that the attention can be saved.

    In a checkpointed block fastac sees the call of its kernel, which torch.compile(flex_attention) hides.

    Args:
        function: the function to compile.
        options: options of torch.compile.

    Returns:
        The compiled function.

    Raises:
        FastacError: a torch before 2.13.

    Example:
        >>> attend = fastac.compile_attention(flex_attention, dynamic=False)
    """
    releases.need(releases.FLEX, "Train with flex_attention as it is, in eager mode.")
    return torch.compile(function, **_ready(options))


def _ready(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with fastac's inductor in the place of torch's. torch.compile raises for an unknown option."""
    torch.compile(_name_of, **options)  # only for its errors: nothing calls what it returns
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
    """The options that fastac compiled a call or a forward with; None if it did not."""
    return getattr(compiled, "_fastac_options", None)


class CompiledForward:
    """The compiled forward of a block, for a checkpointed forward to call. It looks like a method of the block.

    A copy of the block is not compiled, as in torch.
    """

    # The engine asks a function for `__self__`, its block, and for the callable that dynamo compiled.
    __name__ = "forward"

    def __init__(
        self, block: torch.nn.Module, forward: Callable[..., Any], options: dict[str, Any], ready: dict[str, Any]
    ) -> None:
        eager = forward._torchdynamo_orig_callable if isinstance(forward, CompiledForward) else forward
        self.__self__ = block
        self._fastac_options = options
        self._torchdynamo_orig_callable: Callable[..., Any] = eager  # the name that dynamo's own wrappers use
        self._compiled = torch.compile(eager, **ready)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        # Compiled code cannot be pickled. torch leaves it out of a module's state, too (pytorch 97565).
        return _uncompiled, (self._torchdynamo_orig_callable,)


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
