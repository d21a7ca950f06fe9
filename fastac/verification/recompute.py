"""What recompute runs, and how long that takes: a kernel that no name shows stands out by its time."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fastac import registry
from fastac.backends import opaque
from fastac.diagnosis.tables import new_table, render
from fastac.engine.fingerprints import COMPARISON
from fastac.engine.region import RECOMPUTE
from fastac.registry.torch_private import TORCH_NAMESPACES, name_of, op_names

MOST_LISTED = 5
"""How many ops and Functions are listed."""

MOST_UNKNOWN = 0.2
"""`verify` warns of an unknown op or Function that takes more than this share of recompute."""


@dataclasses.dataclass(frozen=True)
class RecomputeProfile:
    """What the recomputes of a step ran: ops and autograd.Functions as the block calls them, not what they call.

    In compiled code, these are the ops that it calls. Attention that a tape answered is left out: no kernel ran.
    """

    times: Mapping[str, int]
    """The time of each op or Function, in ns: of its kernels if an accelerator ran them, else of the op itself."""
    marks: Mapping[str, str]
    """By op or Function, "known" (torch's, or with a row) or "unknown"."""
    on_device: bool
    """Whether `times` are those of kernels."""

    def __add__(self, other: RecomputeProfile) -> RecomputeProfile:
        """The sum of two profiles, as of two blocks."""
        times = Counter(self.times) + Counter(other.times)
        return RecomputeProfile(times, {**self.marks, **other.marks}, self.on_device)

    def shares(self) -> dict[str, float]:
        """The share of each op and Function in the time of all, largest first."""
        total = sum(self.times.values()) or 1
        return {name: time / total for name, time in Counter(self.times).most_common()}

    def __str__(self) -> str:
        title = f"What recompute ran in verify, by {'device' if self.on_device else 'op'} time"
        table = new_table(title, "op or autograd.Function", "share", "status")
        table.columns[1].justify = "right"
        for name, share in list(self.shares().items())[:MOST_LISTED]:
            table.add_row(name, f"{share:.0%}", self.marks[name])
        return render(table)


# Weak keys: a profile does not keep its model alive.
latest: weakref.WeakKeyDictionary[torch.nn.Module, RecomputeProfile] = weakref.WeakKeyDictionary()
"""The profile of the latest `verify` of each model, for its report."""


def recompute_of(events: Sequence[Any], answered: Mapping[str, int]) -> RecomputeProfile | None:
    """What the recomputes of a backward ran; None if there was none.

    Args:
        events: the events of a profiler. Each stands before the events inside it.
        answered: by op, the number of attention calls that were returned from a tape.
    """
    if not any(event.name() == RECOMPUTE for event in events):
        return None
    # The dispatcher does not list higher-order ops, so those that have a row are added.
    bound = {name_of(op.op): op.is_attention for op in registry.present_ops()}
    # The profiler names an op without its overload.
    ops = {name.partition(".")[0] for name in op_names()} | bound.keys()
    functions: dict[str, bool] = {}
    for name, is_known in _functions(torch.autograd.Function):
        # Several classes may have the same name. It is known only if all of them are.
        functions[name] = is_known and functions.get(name, True)
    op_times: Counter[str] = Counter()
    device_times: Counter[str] = Counter()
    launched: dict[int, str] = {}  # correlation id -> the outermost op or Function that launched the kernel
    inside: dict[str, Counter[str]] = {}  # outermost op or Function -> the attention ops in it, with their times
    called: Counter[str] = Counter()  # attention op -> the number of its calls
    spans: dict[int, int] = {}  # thread -> the end of the recompute that began last
    tops: dict[int, tuple[int, str]] = {}  # thread -> the end and the name of the outermost op or Function
    on_device = []
    for event in events:
        name, thread = event.name(), event.start_thread_id()
        if event.device_type().name != "CPU":
            on_device.append(event)
        elif name == RECOMPUTE:
            # A nested region ends before the outer one, which goes on.
            spans[thread] = max(event.end_ns(), spans.get(thread, 0))
        # Events are sorted by their start, outer ones first: the end of the latest recompute says what is inside it.
        elif event.start_ns() < spans.get(thread, 0):
            end, top = tops.get(thread, (0, ""))
            # Only the outermost op or Function counts: its time contains the times of those inside it.
            if event.start_ns() >= end:
                if name == "CompiledFunction" or not (name in ops or name in functions or name == COMPARISON):
                    # A range that the user recorded is not an op. Of compiled code, the ops inside it count.
                    continue
                # The comparison of values is fastac's work, not the block's: nothing inside it counts.
                top = "" if name == COMPARISON else name
                tops[thread] = event.end_ns(), top
                if top:
                    op_times[top] += event.duration_ns()
            # A kernel runs after the op that launched it has returned. The correlation id leads back to that op.
            launched[event.correlation_id()] = top
            if bound.get(name):
                inside.setdefault(top, Counter())[name] += event.duration_ns()
                called[name] += 1
    for event in on_device:
        if top := launched.get(event.linked_correlation_id(), ""):
            device_times[top] += event.duration_ns()
    marks = {}
    for name, time in op_times.items():
        is_known = _is_known(name) or name in bound if "::" in name else functions[name]
        # A user's Function that spends most of its time in a known attention is known as well. With less, it may hide
        # another kernel beside that attention.
        is_attention = name in inside and (is_known or 2 * inside[name].total() > time)
        # Under `min_kv`, some calls of an op are saved and others run again: it is left out only if none ran.
        if not is_attention or any(answered.get(op, 0) < called[op] for op in inside[name]):
            marks[name] = "known" if is_known or is_attention else "unknown"
    times = {name: time for name, time in (device_times or op_times).items() if name in marks}
    return RecomputeProfile(times, marks, bool(device_times)) if times else None


def _is_known(op: str) -> bool:
    """Whether an op is torch's, or a row says that it is not attention."""
    namespace, _, name = op.partition("::")
    # What torch's own ops do is known: only ops of others can hide an attention by a neutral name.
    return namespace in TORCH_NAMESPACES or registry.is_other(namespace, name)


def _functions(base: type) -> Iterator[tuple[str, bool]]:
    """Names of the autograd.Functions of this process, and whether fastac knows what they do."""
    function: type
    for function in base.__subclasses__():
        is_of_torch = function.__module__.partition(".")[0] == "torch"
        is_known = is_of_torch or opaque.is_visible(function)
        yield function.__name__, is_known or registry.is_other(function.__module__, function.__name__)
        yield from _functions(function)
