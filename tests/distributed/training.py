"""What data-parallel tests share: a training on every rank under several policies, and one process that does it all.

Each rank has a part of the batch. A training is two steps with a change of the weights between them: what engines set
up in their first step is there in the second.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import fastac
from tests import support
from tests.distributed import steps
from tests.distributed.steps import Counts, Measured
from tests.support import Tensors, assert_same
from tests.ways import recipes
from tests.ways.recipes import ATTENTION, Batch

STEPS = 2
POLICIES = ("none", "full", "attn_only")
LEARNING_RATE = 1e-2

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a model is trained; every function is one of a module, for ranks get them by name.

    wrap: the engine. prepare: called with the bare model, as well in the single process that it is compared with.
    order: of wrap and enable. enable: in the place of fastac.enable; called with the policy "none", too. last: told
    before every micro-batch whether it is the last of a step; may return a context for it. data: what a rank makes of
    its batch. compiles: in the first step, in which more runs then, the tracing itself to begin with.
    """

    wrap: Wrap
    name: str = recipes.WAN
    prepare: Wrap | None = None
    order: str = "wrap, enable"
    enable: Callable[[torch.nn.Module, str], object] | None = None
    last: Callable[[torch.nn.Module, bool], AbstractContextManager[Any] | None] | None = None
    micro_batches: int = 1
    data: Callable[[Batch, int], Batch] | None = None
    world: int = 2
    compiles: bool = False


@dataclasses.dataclass
class Trained:
    """A training on one rank. steps: one for every micro-batch. warnings: those of fastac."""

    steps: list[Measured]
    report: fastac.Report
    warnings: list[str]

    @property
    def tensors(self) -> Tensors:
        return {f"{number}: {name}": t for number, one in enumerate(self.steps) for name, t in one.tensors.items()}

    @property
    def attention(self) -> list[Counts]:
        return [one.attention for one in self.steps]


class Warnings(logging.Handler):
    """Keeps what fastac warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("fastac").addHandler(self)
        return self.messages

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("fastac").removeHandler(self)


def on_each_rank(setup: Setup, policies: Sequence[str] = POLICIES) -> tuple[dict[str, Trained], Tensors]:
    """What a rank runs: the training under each policy, and this rank's part of what one process computes.

    A policy may be several, by rank: "attn_only|full".
    """
    trained = {policy: train(setup, of_rank(policy, dist.get_rank())) for policy in policies}
    return trained, alone(setup) if setup.data is None else {}


def of_rank(policy: str, rank: int) -> str:
    """The policy of one rank."""
    each = policy.split("|")
    return each[rank % len(each)]


def train(setup: Setup, policy: str) -> Trained:
    """The training of this rank's part of the batch."""
    bare, batch = recipes.build(setup.name)
    wrapped = bare if setup.prepare is None else setup.prepare(bare)
    batches = recipes.batches(batch, STEPS * setup.micro_batches * setup.world)
    rank = dist.get_rank()
    measured = []
    with Warnings() as warnings:
        if setup.order == "enable, wrap":
            enable(wrapped, policy, setup)
        wrapped = setup.wrap(wrapped)
        if setup.order == "wrap, enable":
            enable(wrapped, policy, setup)
        for number in range(STEPS):
            for micro in range(setup.micro_batches):
                one = batches[(number * setup.micro_batches + micro) * setup.world + rank]
                one = one if setup.data is None else setup.data(one, rank)
                is_last = micro == setup.micro_batches - 1
                context = setup.last(wrapped, is_last) if setup.last is not None else None
                with context or nullcontext():
                    measured.append(steps.measured(wrapped, one, accumulate=micro > 0))
            descend(wrapped)
        report = fastac.report(wrapped)
    for one in measured:
        one.tensors = {plain_name(name): tensor for name, tensor in one.tensors.items()}
    return Trained(measured, report, warnings)


def enable(model: torch.nn.Module, policy: str, setup: Setup) -> None:
    """Switch a policy on, "none" for none."""
    if setup.enable is not None:
        setup.enable(model, policy)
    elif policy != "none":
        fastac.enable(model, policy)


def descend(model: torch.nn.Module) -> None:
    """Change what is trained by its gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def alone(setup: Setup) -> Tensors:
    """One process with every rank's part of the batch at once: losses and outputs of this rank's part, all gradients.

    Losses are summed over parts and divided by their number, as engines average gradients.
    """
    model, batch = recipes.build(setup.name)
    if setup.prepare is not None:
        model = setup.prepare(model)
    batches = recipes.batches(batch, STEPS * setup.micro_batches * setup.world)
    rank = dist.get_rank()
    tensors: Tensors = {}
    for number in range(STEPS):
        model.zero_grad()
        for micro in range(setup.micro_batches):
            index = number * setup.micro_batches + micro
            parts = batches[index * setup.world : (index + 1) * setup.world]
            outputs = model(**joined(parts))[0].chunk(setup.world)
            losses = [support.loss_of((one,)) for one in outputs]
            (sum(losses, torch.zeros(())) / setup.world).backward()
            tensors[f"{index}: loss"] = losses[rank].detach()
            tensors[f"{index}: output.0"] = outputs[rank].detach()
        tensors |= {f"{index}: {name}": t for name, t in support.gradients(support.leaves_of(model, {})).items()}
        descend(model)
    return tensors


def joined(parts: list[Batch]) -> Batch:
    """The clips of several batches in one."""
    return {
        key: torch.cat([part[key] for part in parts]) if is_by_clip(key, value) else value
        for key, value in parts[0].items()
    }


def is_by_clip(key: str, value: Any) -> bool:
    """Whether an input has one entry for every clip."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and "rope" not in key


def plain_name(name: str) -> str:
    """A parameter's name as it is without wrappers."""
    for part in ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def assert_trained_alike(
    found: list[tuple[dict[str, Trained], Tensors]], setup: Setup, rounding: float = 1e-5, shards: bool = False
) -> None:
    """On each rank: every policy has the bits of no checkpointing, and these are the single process's but for rounding.

    Attention runs once under attn_only, twice under full; no policy adds a collective; fastac warns of nothing and
    reports what was saved.
    shards: gradients are shards, so that only losses and outputs can be compared, which depend on those before.
    """
    attention = ATTENTION[setup.name]
    for rank, (trained, expected) in enumerate(found):
        plain = trained["none"]
        if setup.data is None:
            whole = {name: t for name, t in expected.items() if not shards or "gradient" not in name}
            assert_close({name: t for name, t in plain.tensors.items() if name in whole}, whole, rounding)
        counted = plain.steps[1 if setup.compiles else 0 :]
        assert [one.attention for one in counted] == [(attention.calls, 0)] * len(counted), plain.attention
        assert all(one.backward for one in plain.steps[setup.micro_batches - 1 :: setup.micro_batches])
        for several, one in trained.items():
            policy = of_rank(several, rank)
            assert_same(one.tensors, plain.tensors)
            again = attention.in_blocks if policy == "full" else 0
            assert one.attention[-len(counted) :] == [(attention.calls, again)] * len(counted), (policy, one.attention)
            for step, other in zip(one.steps[-len(counted) :], counted, strict=True):
                assert step.forward == other.forward, f"{policy}: {step.forward}, not {other.forward}"
                assert step.backward == other.backward, f"{policy}: {step.backward}, not {other.backward}"
            assert not one.warnings, f"{policy}: {one.warnings}"
            if policy == "attn_only":
                assert one.report.active
                assert sum(row.saved for row in one.report.rows) == attention.in_blocks, str(one.report)
                assert not sum(row.recomputed for row in one.report.rows), str(one.report)
                assert not any(row.writing for row in one.report.rows), str(one.report)
                assert not one.report.problem


def assert_close(found: Tensors, expected: Tensors, rounding: float) -> None:
    """All names are there, and differ by no more than rounding of their largest number."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    largest = max((float(t.abs().max()) for name, t in expected.items() if "gradient" in name), default=0.0)
    for name, tensor in expected.items():
        # The bias of a key has no part in a softmax: what it gets is the rounding of others.
        scale = max(float(tensor.abs().max()), 1e-3 * largest)
        difference = float((found[name].double() - tensor.double()).abs().max())
        assert difference <= rounding * scale, f"{name}: {difference:.3g} of {scale:.3g}"
