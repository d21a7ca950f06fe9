"""Training on a rank: what a step computed, and what torch's profiler saw run in it.

Counted are attention kernels and collectives, as they are executed. A counting kernel (tests/support.py) would hold the
GIL while it runs, and may hang with collectives.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fastac
from fastac.engine import releases
from fastac.engine.torch_private import profiled_events
from tests import support
from tests.distributed import ranks
from tests.support import CPU_ATTENTION, Tensors, assert_same
from tests.ways.recipes import ATTENTION, WAN, Batch, batches, build

Counts = tuple[int, int]


@dataclasses.dataclass
class Measured:
    """One step."""

    tensors: Tensors  # loss, outputs, gradients, by name
    attention: Counts  # kernels that ran in forward and in backward
    forward: Counter[str]  # collectives by name, such as "gloo:all_to_all"
    backward: Counter[str]

    @property
    def collectives(self) -> Counts:
        """How many collectives of any kind ran in forward and in backward."""
        return self.forward.total(), self.backward.total()


def measured(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], torch.Tensor] = support.loss_of,
    attention: str | Collection[str] = CPU_ATTENTION,
    accumulate: bool = False,
) -> Measured:
    """Forward and backward of a model on this rank. accumulate: gradients are added to those that there are."""
    if not accumulate:
        model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        outputs = model(**batch)
        loss = loss_of(outputs)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    tensors = {"loss": loss.detach()} | support.flat_tensors(outputs, "output")
    tensors |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"gradient of {name}": t.grad for name, t in batch.items() if getattr(t, "grad", None) is not None}
    return Measured(
        {name: whole(tensor) for name, tensor in tensors.items()},
        (runs(forward, attention), runs(backward, attention)),
        collectives(forward),
        collectives(backward),
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with all of its shards. Every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


COPIES = ("clone", "to", "sum", "arange", "cat", "stack", "linalg_vector_norm", "new_zeros", "new_empty")
"""Ops that copy or add up tensors."""


def runs(profiled: profile, attention: str | Collection[str] = CPU_ATTENTION) -> int:
    """Executions of a kernel. One that runs allocates its output.

    A replayed call is an event, too. It may copy what was kept, and what autograd saves is added up in some steps.
    """
    names = (attention,) if isinstance(attention, str) else attention
    around: dict[int, list[Any]] = defaultdict(list)  # by thread: calls and copies that have not ended
    ran: set[Any] = set()
    outer: set[Any] = set()  # where one call is inside another, the inner one allocates for both
    for event in profiled_events(profiled):
        name = event.name()
        is_call, is_copy = name in names, name.removeprefix("aten::") in COPIES
        if not (is_call or is_copy or name.startswith("aten::empty")):
            continue
        opened = around[event.start_thread_id()]
        while opened and opened[-1].end_ns() < event.end_ns():
            opened.pop()
        if is_call:
            outer.update(one for one in opened if one.name() in names)
        if is_call or is_copy:
            opened.append(event)
        elif opened and opened[-1].name() in names:
            ran.add(opened[-1])
    return len(ran - outer)


def collectives(profiled: profile) -> Counter[str]:
    """Collectives that ran, by name, such as "gloo:all_to_all"."""
    names = [event.name() for event in profiled_events(profiled)]
    return Counter(name for name in names if name.startswith(("gloo:", "nccl:")))


# Trainings with a part of the batch on each rank

STEPS = 2
"""With other weights in the second, in which everything is set up that an engine sets up."""


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What fastac logs from a level on."""
    messages: list[str] = []
    logger, handler = logging.getLogger("fastac"), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def enable(model: torch.nn.Module, policy: str) -> None:
    """Switch a policy on, "none" for none."""
    if policy != "none":
        fastac.enable(model, policy)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How tiny Wan is trained. Functions are those of a module: ranks get them by name."""

    wrap: Callable[[Any], torch.nn.Module]  # the engine
    plain: Callable[[Any], torch.nn.Module] | None = None  # the engine without checkpointing, where that is another
    prepare: Callable[[Any], torch.nn.Module] | None = None  # called with the bare model
    order: str = "wrap, enable"
    enable: Callable[[Any, str], object] = enable  # called under "none", too
    last: Callable[[Any, bool], AbstractContextManager[Any] | None] | None = None
    """Called before a micro-batch with whether it is the last of a step. May return a context for it."""
    micro_batches: int = 1
    data: Callable[[Batch, int], Batch] | None = None  # what a rank makes of its batch
    world: int = 2
    policies: tuple[str, ...] = ("none", "attn_only")  # one may be several, by rank: "attn_only|full"
    compiles: bool = False  # in the first step, in which more runs then


class Trained(NamedTuple):
    """A training on one rank."""

    steps: list[Measured]  # one for every micro-batch
    report: fastac.Report
    warnings: list[str]


def _on_rank(setup: Setup) -> dict[str, Trained]:
    return {policy: train(setup, of_rank(policy, dist.get_rank())) for policy in setup.policies}


def of_rank(policy: str, rank: int) -> str:
    """The policy of one rank."""
    each = policy.split("|")
    return each[rank % len(each)]


def train(setup: Setup, policy: str) -> Trained:
    """The training of this rank's part of the batch."""
    model, batch = build(WAN)
    model = model if setup.prepare is None else setup.prepare(model)
    rank, found = dist.get_rank(), []
    every = batches(batch, STEPS * setup.micro_batches * setup.world)[rank :: setup.world]
    with logged(logging.WARNING) as warnings:
        for part in setup.order.split(", "):
            if part == "enable":
                setup.enable(model, policy)
            else:
                model = (setup.wrap if policy != "none" or setup.plain is None else setup.plain)(model)
        for number, one in enumerate(every, 1):
            is_last = number % setup.micro_batches == 0
            context = None if setup.last is None else setup.last(model, is_last)
            with context or nullcontext():
                inputs = one if setup.data is None else setup.data(one, rank)
                found.append(measured(model, inputs, accumulate=(number - 1) % setup.micro_batches > 0))
            if is_last:
                descend(model)
        report = fastac.report(model)
    for step in found:
        step.tensors = {plain_name(name): tensor for name, tensor in step.tensors.items()}
    return Trained(found, report, warnings)


def descend(model: torch.nn.Module) -> None:
    """Change what is trained by its gradients."""
    torch.optim.SGD(model.parameters(), lr=1e-2).step()


def plain_name(name: str) -> str:
    """A parameter's name as it is without wrappers."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def assert_trained_alike(setup: Setup) -> None:
    """Train on ranks. Every policy has the bits of no checkpointing.

    Attention runs once under attn_only, twice under full. No policy adds a collective. fastac warns of nothing, and
    reports what was saved.
    """
    attention = ATTENTION[WAN]
    counts_collectives = releases.is_at_least("2.12")
    for rank, trained in enumerate(ranks.run(_on_rank, setup, world=setup.world)):
        plain = trained["none"]
        counted = plain.steps[1 if setup.compiles else 0 :]
        assert [one.attention for one in counted] == [(attention, 0)] * len(counted)
        assert not counts_collectives or all(
            one.backward for one in plain.steps[setup.micro_batches - 1 :: setup.micro_batches]
        )
        for several, one in trained.items():
            policy = of_rank(several, rank)
            for step, other in zip(one.steps, plain.steps, strict=True):
                assert_same(step.tensors, other.tensors)
            again = attention if policy == "full" else 0
            for step, other in zip(one.steps[-len(counted) :], counted, strict=True):
                assert step.attention == (attention, again), policy
                # The profiler of older releases loses collectives of gloo's now and then.
                if counts_collectives:
                    assert (step.forward, step.backward) == (other.forward, other.backward), policy
            assert not one.warnings, f"{policy}: {one.warnings}"
            if policy == "attn_only":
                assert one.report.active
                assert sum(row.saved for row in one.report.rows) == attention, str(one.report)
