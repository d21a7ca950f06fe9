"""Bytes and FLOPs of any policy on one model and one size of inputs, from simulations of a step."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fastac.errors import FastacError
from fastac.planning import knapsack
from fastac.planning.fake_model import FakeModel
from fastac.planning.fake_weights import stored_bytes
from fastac.planning.knapsack import Marks
from fastac.planning.simulation import Split, simulate
from fastac.planning.timeline import EXCHANGED, Candidate, Timeline, block_name
from fastac.policy import NAMED, Policy

OPTIMIZERS: Mapping[str, Callable[[int], float]] = {
    "adamw": lambda size: 2 * size,
    "adamw8bit": lambda size: 2 * (1 + 4 / 256),  # one fp32 scale for 256 numbers, as in bitsandbytes
    "sgd": lambda size: 0,
}
"""Optimizer -> bytes of state for each trained number of `size` bytes."""

MIB = 2**20

AnyPolicy = str | Policy | Mapping[str, str | Policy]


@dataclass(frozen=True)
class PolicyPlan:
    """Bytes and FLOPs of one step under one policy, on one device."""

    policy: str
    saved_bytes: int  # of saved outputs
    held_bytes: int  # all that is alive between forward and backward on the device, saved outputs among it
    host_bytes: int  # in host memory between forward and backward
    peak_bytes: int  # the most at one time: weights, gradients, the optimizer's states, activations
    recomputed_flops: int
    flops: int  # of forward, recompute and backward
    relative: float  # flops, relative to full checkpointing
    bytes_per_flop: float  # the most that are copied in one direction per FLOP that runs meanwhile


@dataclass(frozen=True)
class States:
    """Bytes on one device besides those that a step allocates."""

    weights: int
    optimizer: int
    gathered: int = 0  # weights of other ranks, and whole gradients, of the blocks that run

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer + self.gathered


def states_of(
    model: torch.nn.Module, optimizer: str = "adamw", gpus: int = 1, blocks: Iterable[torch.nn.Module] = ()
) -> States:
    """The states of a model and its optimizer on each of several GPUs, over which FSDP2 shards the parameters.

    Two blocks are gathered at a time, the one that runs and the next, and the gradients of one are whole.
    Raises FastacError for an unknown optimizer, or fewer GPUs than 1.
    """
    if optimizer not in OPTIMIZERS:
        raise FastacError(f"plan(optimizer={optimizer!r}): there are {', '.join(OPTIMIZERS)}")
    if gpus < 1:
        raise FastacError(f"plan(gpus={gpus}): 1 or more was expected")
    parameters = sum(map(stored_bytes, model.parameters()))
    buffers = sum(map(stored_bytes, model.buffers()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = sum(parameter.numel() * OPTIMIZERS[optimizer](parameter.itemsize) for parameter in trained)
    gathered = (2 * sum(map(stored_bytes, one.parameters())) + _trained_bytes(one) for one in blocks if gpus > 1)
    return States(parameters // gpus + buffers, int(kept / gpus), max(gathered, default=0))


def _trained_bytes(module: torch.nn.Module) -> int:
    return sum(one.nbytes for one in module.parameters() if one.requires_grad)


class Forecast:
    """Steps of a model on one size of inputs, simulated with full checkpointing of all blocks, of none, or of some."""

    def __init__(
        self,
        fake_model: FakeModel,
        optimizer: str = "adamw",  # a name in OPTIMIZERS
        gpus: int = 1,  # over which FSDP2 shards weights, gradients and the optimizer's states
        split: Split = Split(),  # noqa: B008 it is frozen
    ) -> None:
        self.fake_model, self.gpus, self.split = fake_model, gpus, split
        self.states = states_of(fake_model.model, optimizer, gpus, fake_model.blocks.values())
        self.gradients = _trained_bytes(fake_model.model) // gpus
        self._steps: dict[frozenset[str], Timeline] = {}  # by the names of the blocks that are checkpointed

    def policies(self, policy: AnyPolicy) -> dict[str, Policy]:
        """The policies of all blocks. policy: one for all, or one of each block, by values or names."""
        each = policy if isinstance(policy, Mapping) else dict.fromkeys(self.fake_model.blocks, policy)
        return {name: NAMED[one] if isinstance(one, str) else one for name, one in each.items()}

    def step(self, policy: AnyPolicy) -> Timeline:
        """A step with full checkpointing of those blocks that a policy checkpoints."""
        while (names := self._checkpointed(policy)) not in self._steps:
            step = simulate(self.fake_model, names, self.split)
            if names == self._checkpointed(policy):  # else it found more blocks
                self._steps[names] = step
        return self._steps[names]

    def _checkpointed(self, policy: AnyPolicy) -> frozenset[str]:
        return frozenset(name for name, one in self.policies(policy).items() if one.checkpoints)

    @property
    def full(self) -> Timeline:
        """A step with full checkpointing of all blocks."""
        return self.step("full")

    def outputs(self) -> dict[str, list[Candidate]]:
        """Outputs that a policy of each block could save, by the block's name."""
        found: dict[str, list[Candidate]] = {}
        for region, candidates in self.full.candidates.items():
            mine = found.setdefault(block_name(region), [])
            mine += [one for one in candidates if one.name not in ("", EXCHANGED)]
        return found

    def smallest(self, linear: bool = True) -> int | None:
        """The fewest bytes with which `within` saves something; None where there is nothing to save."""
        sizes: Counter[tuple[str, int, str]] = Counter()
        for block, found in self.outputs().items():
            longest = max((one.keys for one in found), default=0)  # attention over fewer keys is saved with it alone
            for one in found:
                if one.flops and one.keys in (longest, 0) and (linear or one.keys):
                    sizes[block, one.keys, "" if one.keys else one.name] += one.bytes
        return min(sizes.values(), default=None)

    def peak(self, policy: AnyPolicy, step: Timeline | None = None) -> int:
        """The most bytes that are allocated at one time under a policy. step: of these inputs, or on a line to them."""
        return self.states.total + (step or self.step(policy)).peak(self.policies(policy), self.gpus)

    def plan(self, policy: AnyPolicy, name: str = "") -> PolicyPlan:
        """The plan of a policy. name: by default the policy's."""
        step, policies = self.step(policy), self.policies(policy)
        recomputed = step.recomputed(policies)
        flops = step.flops["forward"] + recomputed + step.flops["backward"]
        return PolicyPlan(
            policy=name or str(policy),
            saved_bytes=step.saved_bytes(policies),
            held_bytes=step.held(policies),
            host_bytes=sum(copies.bytes for copies in step.copies(policies)),
            peak_bytes=self.peak(policy),
            recomputed_flops=recomputed,
            flops=flops,
            relative=flops / self.full.flops.total(),
            bytes_per_flop=step.bytes_per_flop(policies),
        )

    def within(self, limit: int, linear: bool = True, offload: bool = False) -> dict[str, Policy]:
        """The policies of all blocks that avoid the most recompute with `limit` bytes of saved outputs.

        Collectives of context parallelism count first; where they alone are more they are issued again. linear: whether
        outputs of Linear modules may be among them. offload: whether they, and inputs of blocks, wait in host memory.
        """
        outputs = {block: [one for one in found if linear or one.keys] for block, found in self.outputs().items()}
        exchanged = Counter[str]()
        for region, found in self.full.candidates.items():
            exchanged[block_name(region)] += sum(one.bytes for one in found if one.name == EXCHANGED)
        left = limit - exchanged.total()
        collectives, left = ("save", left) if left >= 0 else ("recompute", limit)
        chosen = {
            block: policy_of(marks, outputs[block], collectives, exchanged[block] > 0)
            for block, marks in knapsack.choose_outputs(outputs, left).items()
        }
        # Long lists of sums are thinned: then a policy by name may be slightly better.
        ways = [chosen, *map(self.policies, ("attn_only", "long_attn_only"))]
        fitting = [way for way in ways if self.full.saved_bytes(way) <= limit]
        best = min(fitting, key=self.full.recomputed)
        return {block: replace(mine, offload=offload) for block, mine in best.items()}

    def largest_budget(self, memory: int, offload: bool = False) -> int | None:
        """The most bytes of saved outputs with which a step fits a memory; None where full checkpointing does not.

        To within a thousandth of all that could be saved; in whole MiB if that is 1 MiB or more.
        """
        if self.peak(Policy("full", offload=offload)) > memory:
            return None
        everything = sum(one.bytes for found in self.full.candidates.values() for one in found if one.name)
        unit = MIB if everything >= MIB else 1

        def fits(units: int) -> bool:
            return self.peak(self.within(units * unit, offload=offload)) <= memory

        high = -(-everything // unit)
        if fits(high):
            return high * unit
        budgets = range(0, high, max(1, high // 1000))
        return unit * budgets[bisect.bisect_left(budgets, True, 1, key=lambda units: not fits(units)) - 1]

    def frontier(self, points: int = 257) -> list[tuple[int, float]]:
        """Saved bytes and FLOPs relative to full checkpointing, for growing budgets."""
        full = self.full.flops.total()
        return [(saved, (full - avoided) / full) for saved, avoided in knapsack.frontier(self.outputs(), points)]


def policy_of(marks: Marks, outputs: Sequence[Candidate], collectives: str, communicates: bool) -> Policy:
    """The policy that saves these outputs of a block. communicates: its attention does."""
    keys = [mark for mark in marks if isinstance(mark, int)]
    linear = tuple(dict.fromkeys(one.name for one in outputs if not one.keys and one.name in marks))
    if linear and not keys:
        return Policy("linear_only", collectives=collectives, linear=linear)
    if keys or (communicates and collectives == "save"):  # the latter: of collectives alone
        left_out = [one.keys for one in outputs if one.keys and not (keys and one.keys >= keys[0])]
        return Policy("attn_only", max(left_out, default=-1) + 1, collectives, linear)
    return Policy("full")
