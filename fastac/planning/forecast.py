"""What any policy holds and recomputes on one model and one size of inputs, from two simulations of a step."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastac.errors import FastacError
from fastac.planning import knapsack
from fastac.planning.knapsack import Choice, Output
from fastac.planning.simulation import EXCHANGED, Split
from fastac.planning.subject import Subject, simulated
from fastac.planning.timeline import Candidate, Place, Timeline
from fastac.planning.weights import stored_bytes
from fastac.policy import NAMED, Policy

OPTIMIZERS: Mapping[str, Callable[[int], float]] = {
    "adamw": lambda size: 2 * size,
    "adamw8bit": lambda size: 2 * (1 + 4 / 256),
    "sgd": lambda size: 0,
}
"""Optimizer -> bytes of state for a trained number of so many bytes. 8 bits: with an fp32 scale for 256 of them, as
bitsandbytes has it."""

MIB = 2**20

AnyPolicy = str | Policy | Mapping[str, str | Policy]


@dataclass(frozen=True)
class PolicyPlan:
    """What one policy does in one step. Bytes on one device.

    saved_bytes: outputs that are saved. held_bytes: all that is alive between forward and backward, these among it.
    host_bytes: what waits in host memory then, and is not held. peak_bytes: the most that is allocated at one time:
    weights, gradients, states of the optimizer, activations. flops: of forward, recompute and backward. relative: to
    those of full checkpointing. bytes_per_flop: the most that are copied in one direction per FLOP that runs meanwhile.
    """

    policy: str
    saved_bytes: int
    held_bytes: int
    host_bytes: int
    peak_bytes: int
    recomputed_flops: int
    flops: int
    relative: float
    bytes_per_flop: float


@dataclass(frozen=True)
class States:
    """Bytes on one device besides what a step allocates: weights, the optimizer's, weights that are gathered."""

    weights: int
    optimizer: int
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer + self.gathered


def states_of(
    model: torch.nn.Module, optimizer: str = "adamw", gpus: int = 1, blocks: Iterable[torch.nn.Module] = ()
) -> States:
    """What a model and its optimizer hold on each of several GPUs, which FSDP2 gives equal parts of the parameters.

    Of the blocks two are gathered at a time, the one that runs and the next, and the gradients of one are whole.
    Raises FastacError for an optimizer that is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise FastacError(f"plan(optimizer={optimizer!r}): there are {', '.join(OPTIMIZERS)}")
    if gpus < 1:
        raise FastacError(f"plan(gpus={gpus}): 1 or more was expected")
    parameters = sum(map(stored_bytes, model.parameters()))
    buffers = sum(map(stored_bytes, model.buffers()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = sum(parameter.numel() * OPTIMIZERS[optimizer](parameter.itemsize) for parameter in trained)
    gathered = 0
    if gpus > 1:
        sizes = [
            2 * sum(map(stored_bytes, block.parameters()))
            + sum(one.nbytes for one in block.parameters() if one.requires_grad)
            for block in blocks
        ]
        gathered = max(sizes, default=0)
    return States(parameters // gpus + buffers, int(kept / gpus), gathered)


def block_of(region: str) -> str:
    """The name of the block that a region is a call of."""
    return region.partition("#")[0]


class Forecast:
    """A model's step, simulated without and with full checkpointing: what is common to all policies.

    optimizer: a name in OPTIMIZERS. gpus: among how many FSDP2 shards weights, gradients and the optimizer's states.
    split: the part of the tokens that one rank of context parallelism has.
    """

    def __init__(
        self,
        subject: Subject,
        optimizer: str = "adamw",
        gpus: int = 1,
        split: Split = Split(),  # noqa: B008 it is frozen
    ) -> None:
        self.subject, self.gpus, self.split = subject, gpus, split
        self._partly: dict[frozenset[str], Timeline] = {}
        self.states = states_of(subject.model, optimizer, gpus, subject.blocks.values())
        self.gradients = sum(one.nbytes for one in subject.model.parameters() if one.requires_grad) // gpus

    @functools.cached_property
    def plain(self) -> Timeline:
        """A step without checkpointing."""
        return simulated(self.subject, (), self.split)

    @functools.cached_property
    def full(self) -> Timeline:
        """A step under full checkpointing."""
        return simulated(self.subject, self.subject.blocks, self.split)

    def step(self, policies: Mapping[str, Policy]) -> Timeline:
        """A step under full checkpointing of those blocks that these policies checkpoint."""
        names = frozenset(name for name, policy in policies.items() if policy.checkpoints)
        if not names or len(names) == len(policies):
            return self.full if names else self.plain
        if names not in self._partly:
            self._partly[names] = simulated(self.subject, names, self.split)
        return self._partly[names]

    def policies(self, policy: AnyPolicy) -> dict[str, Policy]:
        """The policies of all blocks: of one for all, or one of each block, by values or names."""
        each = policy if isinstance(policy, Mapping) else dict.fromkeys(self.subject.blocks, policy)
        return {name: NAMED[one] if isinstance(one, str) else one for name, one in each.items()}

    @property
    def candidates(self) -> Mapping[str, Sequence[Candidate]]:
        """What each region could save, by its name."""
        return self.full.candidates

    def outputs(self) -> dict[str, list[Output]]:
        """What a policy of each block could save, by the block's name."""
        found: dict[str, list[Output]] = {}
        for region, candidates in self.candidates.items():
            found.setdefault(block_of(region), []).extend(
                Output(one.name, one.bytes, one.flops, one.keys)
                for one in candidates
                if one.name not in ("", EXCHANGED)
            )
        return found

    def saved(self, policy: AnyPolicy) -> list[Place]:
        """What is saved under a policy."""
        policies = self.policies(policy)
        if all(mine.saves_nothing for mine in policies.values()):
            return []

        def is_saved(mine: Policy, one: Candidate) -> bool:
            if one.keys:
                return mine.saves(one.keys)
            if one.name == EXCHANGED:
                return mine.saves_collectives
            return any(fnmatch.fnmatchcase(one.name, pattern) for pattern in mine.linear) and one.name != ""

        return [
            (region, place)
            for region, found in self.candidates.items()
            for place, one in enumerate(found)
            if is_saved(policies[block_of(region)], one)
        ]

    def by_region(self, policy: AnyPolicy) -> dict[str, Policy] | None:
        """The policies of all regions, where one offloads."""
        policies = self.policies(policy)
        if not any(mine.offload for mine in policies.values()):
            return None
        return {region: policies[block_of(region)] for region in self.candidates}

    def peak(self, policy: AnyPolicy) -> int:
        """The most bytes that are allocated at one time under a policy, as in `plan`."""
        step = self.step(self.policies(policy))
        return self.states.total + step.peak(self.saved(policy), self.by_region(policy), self.gpus)

    def plan(self, policy: AnyPolicy, name: str = "") -> PolicyPlan:
        """The plan of a policy. policy: as in `policies`. name: what it is called; default: the policy."""
        step, saved, policies = self.step(self.policies(policy)), self.saved(policy), self.by_region(policy)
        recomputed = step.recomputed(saved)
        total = sum(step.flops.values()) - step.recomputed() + recomputed
        return PolicyPlan(
            policy=name or str(policy),
            saved_bytes=self._bytes(saved),
            held_bytes=step.held(saved, policies),
            host_bytes=sum(copies.bytes for copies in step.copies(saved, policies)),
            peak_bytes=self.peak(policy),
            recomputed_flops=recomputed,
            flops=total,
            relative=total / sum(self.full.flops.values()),
            bytes_per_flop=step.bytes_per_flop(saved, policies),
        )

    def within(self, limit: int, linear: bool = True, offload: bool = False) -> dict[str, Policy]:
        """What every block saves so that most recompute is avoided with `limit` bytes of saved outputs.

        Collectives of context parallelism count first; where they alone are more they are issued again. linear: whether
        outputs of Linear modules may be among them. offload: whether they, and inputs of blocks, wait in host memory.
        """
        outputs = {block: [one for one in found if linear or one.keys] for block, found in self.outputs().items()}
        exchanging = {
            block_of(region) for region, found in self.candidates.items() for one in found if one.name == EXCHANGED
        }
        exchanged = sum(one.bytes for found in self.candidates.values() for one in found if one.name == EXCHANGED)
        collectives = "save" if exchanged <= limit else "recompute"
        choices = knapsack.choose(outputs, limit - exchanged if collectives == "save" else limit)
        chosen = {
            block: policy_of(choice, outputs[block], collectives, block in exchanging)
            for block, choice in choices.items()
        }
        # Lists of sums that are too long are thinned: then a policy by name may be better by a hair.
        ways = [chosen, *(dict.fromkeys(outputs, NAMED[name]) for name in ("attn_only", "long_attn_only"))]
        fitting = [way for way in ways if self._bytes(self.saved(way)) <= limit]
        best = min(fitting, key=lambda way: self.full.recomputed(self.saved(way)))
        return {block: replace(mine, offload=offload) for block, mine in best.items()}

    def largest_budget(self, memory: int, offload: bool = False) -> int | None:
        """The most bytes of saved outputs with which a step fits a memory; None where full checkpointing does not.

        To within a thousandth of all that could be saved, in whole MiB where there are some, as one writes it.
        """
        if self.peak(Policy("full", offload=offload)) > memory:
            return None
        everything = sum(one.bytes for found in self.candidates.values() for one in found)
        unit = MIB if everything >= MIB else 1

        def fits(units: int) -> bool:
            return self.peak(self.within(units * unit, offload=offload)) <= memory

        low, high = 0, -(-everything // unit)
        if fits(high):
            return high * unit  # more than all is all
        tolerance = max(1, high // 1000)
        while high - low > tolerance:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * unit

    def frontier(self, points: int = 257) -> list[tuple[int, float]]:
        """Bytes that are saved and FLOPs relative to full checkpointing, for growing budgets."""
        full = sum(self.full.flops.values())
        return [(saved, (full - avoided) / full) for saved, avoided in knapsack.frontier(self.outputs(), points)]

    def _bytes(self, saved: Collection[Place]) -> int:
        return sum(self.candidates[region][place].bytes for region, place in saved)


def policy_of(choice: Choice, outputs: Sequence[Output], collectives: str, communicates: bool) -> Policy:
    """The policy that saves what was chosen among the outputs of a block. communicates: its attention does."""
    options: dict[str, Any] = {"collectives": collectives, "linear": choice.linear}
    left_out = [one.keys for one in outputs if one.keys and (choice.min_kv is None or one.keys < choice.min_kv)]
    if choice.min_kv is not None:
        return Policy("attn_only", max(left_out) + 1 if left_out else 0, **options)
    if choice.linear:
        return Policy("linear_only", **options)
    if communicates and collectives == "save":  # these alone
        return Policy("attn_only", max(left_out, default=0) + 1, collectives)
    return Policy("full")
