"""What is open in a thread while a checkpointed region runs, and the tape it runs on.

`fastac.interception` reaches the innermost scope, below autograd, with every registered op. `Record` in
`fastac.tape` and `Replay` in `fastac.replay` say what a scope does with it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastac import torch_internals
from fastac.choices import Choices
from fastac.collectives import Communication
from fastac.dispatcher_internals import BELOW_BACKEND_SELECT
from fastac.entries import CountedOps, Entry
from fastac.errors import PolicyNotAppliedError
from fastac.ranks import class_name
from fastac.registry import ResolvedOp

Calls = collections.Counter[str]

execution_counters: list[Calls] = []
"""Counters, by op name, of every attention kernel that is really run while they stand here (fastac.verify)."""


Expected = tuple[int | None, int, int]
"""Rows (None for any number), inputs and outputs of a product."""


class Tape(list[Entry | None]):
    """The entries of one region, and what goes with them."""

    __slots__ = ("choices", "communication", "companions", "linears", "ops", "recording", "watch")

    def __init__(self) -> None:
        super().__init__()
        self.choices = Choices()
        self.communication: Communication | None = None  # of a region that has any
        self.companions: list[object] = []  # what kept outputs need besides, which is no tensor
        self.linears: Mapping[int, str] = {}  # Linear modules whose outputs are saved, by id, and their names
        self.watch: Callable[[], list[RemovableHandle]] = list  # puts hooks on those that have none any more
        self.ops = CountedOps()
        self.recording = False


class _Thread(threading.local):
    """The open scope is per thread: backward runs in other threads."""

    scope: Scope | None = None


thread = _Thread()


def run_kernel(
    resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any], inside: Scope | None = None
) -> Any:
    """Run the kernel itself. An op that it calls is part of it: neither recorded nor replayed.

    inside: the scope that is open while it runs, after all: of an op that is none of its business.
    """
    if execution_counters and resolved.is_attention and not torch_internals.has_stand_ins(args):
        for counter in execution_counters:
            counter[resolved.name] += 1
    scope = thread.scope
    thread.scope = inside
    try:
        return resolved.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)
    finally:
        thread.scope = scope


class Scope:
    """What is open while a region runs in this thread. Scopes nest as checkpointed regions do."""

    outer: Scope | None = None
    linear: str | None = None  # the Linear module that runs now and whose output is saved, by its name in the block
    expected: Expected | None = None  # how its product must look

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._around: list[tuple[str | None, Expected | None]] = []  # what was so when a Linear module began

    def __enter__(self) -> Scope:
        self.outer = thread.scope
        thread.scope = self
        return self

    def __exit__(self, *exception: object) -> None:
        thread.scope, self.outer = self.outer, None

    def run(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Let the call pass: to the region around this one, which may hold its output, or to the kernel."""
        outer = self.outer
        while outer is not None and outer.tape is self.tape:
            outer = outer.outer  # a backward inside the region: the forward around this recompute is its own
        if outer is None:
            return run_kernel(resolved, keyset, args, kwargs)
        return outer.receive(resolved, keyset, args, kwargs)

    def receive(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A registered op was called in this thread while the scope is open."""
        if resolved.is_attention:
            return self.call(resolved, keyset, args, kwargs)
        if resolved.is_collective:
            return self.communicate(resolved, keyset, args, kwargs)
        return self.choose(resolved, keyset, args, kwargs)

    def inner(self) -> int:
        """How many regions are open inside this one."""
        count, scope = 0, thread.scope
        while scope is not None and scope is not self:
            count, scope = count + 1, scope.outer
        return count

    def passes_by(self, resolved: ResolvedOp, args: Sequence[Any]) -> bool:
        """Whether a call is none of the region's business.

        dynamo and AOT call the op with fakes, and sometimes the real kernel on stand-ins, while a region is open.
        """
        return torch_internals.has_stand_ins(args) or resolved not in self.tape.ops

    def let_by(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run such a call. What it calls in turn was seen in the forward, where this op was not one yet."""
        return run_kernel(resolved, keyset, args, kwargs, inside=self)

    def begin_linear(self, module: torch.nn.Linear, expected: Expected | None) -> None:
        """A Linear module that is watched begins its forward in this thread while the scope is open."""
        self._around.append((self.linear, self.expected))
        self.linear, self.expected = self.tape.linears.get(id(module)), expected
        outer = self.outer
        while outer is not None:
            if outer.tape is not self.tape:
                outer.see_inside(module)
            outer = outer.outer

    def see_inside(self, module: torch.nn.Linear) -> None:
        """A Linear module that is watched begins its forward in a region inside this one."""

    def end_linear(self) -> str | None:
        """The Linear module has run, or raised. Returns its name when no product of it was called."""
        name = self.linear
        self.linear, self.expected = self._around.pop() if self._around else (None, None)
        return name

    def no_product(self, module: torch.nn.Linear, name: str) -> None:
        """A Linear module whose output is saved has run, and no product of it was called."""
        raise PolicyNotAppliedError(
            f"the output of the Linear module {name!r} was to be saved, and it ran no product that could be seen: "
            f"{class_name(module)} computes in its own way (quantized, fused or compiled). Leave it out of "
            f"the policy's linear=(...)."
        )

    def product(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Something is multiplied while a Linear module runs whose output is saved: that, or what goes before it."""
        name = self.linear or ""
        left, right = args[-2:]
        found = left.shape[:-1].numel(), right.shape[-2], right.shape[-1]
        rows, *weight = self.expected or found
        if self.passes_by(resolved, args) or rows not in (None, found[0]) or tuple(weight) != found[1:]:
            return self.let_by(resolved, keyset, args, kwargs)
        self.linear = None
        return self.multiply(name, resolved, keyset, args, kwargs)

    def multiply(
        self, linear: str, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The product of a Linear module whose output is saved was called in this thread while the scope is open."""
        raise NotImplementedError

    def call(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An attention op was called in this thread while the scope is open."""
        raise NotImplementedError

    def choose(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Something was chosen, perhaps for sparse attention, in this thread while the scope is open."""
        return self.run(resolved, keyset, args, kwargs)

    def communicate(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A functional collective was called in this thread while the scope is open."""
        return self.run(resolved, keyset, args, kwargs)

    def decomposed(self, resolved: ResolvedOp, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An attention call was decomposed in this thread while the scope is open."""
        if self.outer is not None:
            self.outer.decomposed(resolved, args, kwargs)
