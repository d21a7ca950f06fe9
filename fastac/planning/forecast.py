"""Bytes and FLOPs of any policy on one model and one size of inputs, from simulations of a step."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fastac.errors import FastacError
from fastac.planning.fake_model import FakeModel
from fastac.planning.fake_weights import stored_bytes
from fastac.planning.simulation import Split, simulate
from fastac.planning.timeline import EXCHANGED, Candidate, Timeline, block_name
from fastac.policy import NAMED, AnyPolicy, Policy

OPTIMIZERS: Mapping[str, Callable[[int], float]] = {
    "adamw": lambda size: 2 * size,
    # bitsandbytes has an fp32 scale for every 256 numbers.
    "adamw8bit": lambda size: 2 * (1 + 4 / 256),
    "sgd": lambda size: 0,
}
"""Optimizer -> bytes of state for each trained number of `size` bytes."""

FIXED = ("none", "full", "long_attn_only", "attn_only")
"""The policies that every plan compares."""

ROWS: Mapping[str, Policy] = {name: NAMED[name] for name in FIXED} | {
    f"{name}, offload": replace(NAMED[name], offload=True) for name in FIXED[1:]
}
"""The first rows of every plan: these policies, and the same with offload."""


@dataclass(frozen=True)
class PolicyFigures:
    """Bytes and FLOPs of one step under one policy, on one device."""

    policy: str
    # Bytes of the saved outputs.
    saved_bytes: int
    # All bytes that are alive on the device between forward and backward, with the saved outputs.
    held_bytes: int
    # Bytes that wait in host memory between forward and backward.
    host_bytes: int
    # The most bytes at one time: weights, gradients, the optimizer's states, activations.
    peak_bytes: int
    recomputed_flops: int
    # FLOPs of forward, recompute and backward.
    flops: int
    # `flops`, relative to full checkpointing.
    relative: float
    # The most bytes that are copied in one direction per FLOP that runs meanwhile.
    bytes_per_flop: float


@dataclass(frozen=True)
class States:
    """Bytes on one device besides those that a step allocates."""

    weights: int
    optimizer: int
    # What FSDP2 gathers for the blocks that run: weights of other ranks, and whole gradients.
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer + self.gathered


def _trained_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def _weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters as they are stored. FSDP2 gathers them so."""
    return sum(map(stored_bytes, module.parameters()))


class Output(NamedTuple):
    """What one mark saves in one block: all calls of a Linear module, or attention over so many keys."""

    block: str
    # Name of the Linear module, or number of keys.
    mark: str | int
    bytes: int
    flops: int


class Forecast:
    """Steps of a model on one size of inputs, simulated with full checkpointing of all blocks, of none, or of some."""

    def __init__(
        self,
        fake_model: FakeModel,
        optimizer: str = "adamw",
        gpus: int = 1,
        split: Split = Split(),  # noqa: B008 it is frozen
    ) -> None:
        """FSDP2 shards the parameters, their gradients and the optimizer's states over several GPUs.

        Two blocks are gathered at a time: the block that runs, and the next one. The gradients of one block are whole.
        Raises FastacError for an unknown optimizer, or fewer GPUs than 1.

        optimizer: a name in OPTIMIZERS.
        """
        if optimizer not in OPTIMIZERS:
            raise FastacError(f"plan(optimizer={optimizer!r}): there are {', '.join(OPTIMIZERS)}")
        if gpus < 1:
            raise FastacError(f"plan(gpus={gpus}): 1 or more was expected")
        self.fake_model, self.blocks, self.split = fake_model, fake_model.blocks, split
        # GPUs over which gradients are sharded; a large number if they are allocated already.
        self.gradient_shards, model = gpus, fake_model.model
        self.gradients = _trained_bytes(model) // gpus
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer_bytes = sum(weight.numel() * OPTIMIZERS[optimizer](weight.itemsize) for weight in trained)
        gathered = (2 * _weight_bytes(block) + _trained_bytes(block) for block in self.blocks.values() if gpus > 1)
        weights = _weight_bytes(model) // gpus + sum(map(stored_bytes, model.buffers()))
        self.states = States(weights, int(optimizer_bytes / gpus), max(gathered, default=0))
        # Names of the checkpointed blocks -> the step that was simulated with these.
        self._steps: dict[frozenset[str], Timeline] = {}
        self._policies: dict[Any, Policy] = {}

    def policies(self, policy: AnyPolicy) -> dict[str, Policy]:
        """The policies of all blocks. policy: for all blocks, or a mapping of block names to policies or names."""
        policies = policy if isinstance(policy, Mapping) else dict.fromkeys(self.blocks, policy)
        return {block: NAMED[value] if isinstance(value, str) else value for block, value in policies.items()}

    def step(self, policy: AnyPolicy) -> Timeline:
        """A step with full checkpointing of those blocks that a policy checkpoints."""
        # A simulation adds modules that the model checkpoints itself to the blocks. Simulate again if it found some.
        while (names := self._checkpointed(policy)) not in self._steps:
            step = simulate(self.fake_model, names, self.split)
            if names == self._checkpointed(policy):
                self._steps[names] = step
        return self._steps[names]

    def _checkpointed(self, policy: AnyPolicy) -> frozenset[str]:
        return frozenset(block for block, resolved in self.policies(policy).items() if resolved.checkpoints)

    @property
    def full(self) -> Timeline:
        """A step with full checkpointing of all blocks."""
        return self.step("full")

    @functools.cached_property
    def candidates(self) -> dict[str, list[Candidate]]:
        """Block name -> its candidates, in the order of the forward. Blocks that do not run come last."""
        step, candidates = self.full, dict[str, list[Candidate]]()
        for region in dict.fromkeys([*step.begins, *step.candidates]):
            candidates.setdefault(block_name(region), []).extend(step.candidates[region])
        return candidates

    def ranked(self, linear: bool = True) -> list[Output]:
        """All outputs that avoid FLOPs, the most for a byte first. Of equal ones, those of the last block come first.

        Backward releases the outputs of the last block first. linear: whether those of Linear modules are listed.
        """
        found = []
        for block in reversed(list(self.candidates)):
            sizes, flops = Counter[str | int](), Counter[str | int]()
            for out in self.candidates[block]:
                mark = out.keys or (out.name if linear and out.name != EXCHANGED else "")
                sizes[mark] += out.bytes
                flops[mark] += out.flops if mark else 0
            found += [Output(block, mark, sizes[mark], flops[mark]) for mark in sizes if flops[mark]]
        # Equal outputs of all blocks stand together.
        return sorted(found, key=lambda out: (-out.flops / max(1, out.bytes), -out.bytes, str(out.mark)))

    def saving(self, chosen: Iterable[Output], collectives: str = "save", leaving: int = 0) -> dict[str, Policy]:
        """The policies of all blocks that save these outputs; "save": and those of collectives.

        leaving: so many blocks, the first, wait on the host.
        """
        marks, found = defaultdict[str, set[str | int]](set), {}
        for out in chosen:
            marks[out.block].add(out.mark)
        for number, (block, candidates) in enumerate(self.candidates.items()):
            key = block, frozenset(marks[block]), collectives, number < leaving
            if key not in self._policies:  # hundreds of mixtures of a few policies are tried
                policy = policy_of(key[1], candidates, collectives)
                self._policies[key] = replace(policy, offload=True, keep=1) if key[3] else policy
            found[block] = self._policies[key]
        return found

    def peak(self, policy: AnyPolicy) -> int:
        """The most bytes that are allocated at one time under a policy."""
        return self.states.total + self.step(policy).peak(self.policies(policy), self.gradient_shards)

    def figures(self, policy: AnyPolicy, name: str = "") -> PolicyFigures:
        """The figures of a policy. name: by default the policy's."""
        step, policies = self.step(policy), self.policies(policy)
        recomputed = step.recomputed(policies)
        flops = step.flops["forward"] + recomputed + step.flops["backward"]
        return PolicyFigures(
            policy=name or str(policy),
            saved_bytes=step.saved_bytes(policies),
            held_bytes=step.held(policies),
            host_bytes=step.host_bytes(policies),
            peak_bytes=self.peak(policy),
            recomputed_flops=recomputed,
            flops=flops,
            relative=flops / self.full.flops.total() if flops else 1.0,
            bytes_per_flop=step.bytes_per_flop(policies),
        )


def policy_of(marks: Collection[str | int], candidates: Sequence[Candidate], collectives: str = "save") -> Policy:
    """The policy with which a block saves the outputs of Linear modules, and attention over so many keys and more."""
    keys = [mark for mark in marks if isinstance(mark, int)]
    linear = tuple(dict.fromkeys(out.name for out in candidates if not out.keys and out.name in marks))
    if linear and not keys:
        return Policy("linear_only", collectives=collectives, linear=linear)
    communicates = any(out.name == EXCHANGED and out.bytes for out in candidates)
    # "full" saves no collectives. A block that saves only those has "attn_only" with a min_kv above all its calls.
    if keys or (communicates and collectives == "save"):
        left_out = [out.keys for out in candidates if out.keys and not (keys and out.keys >= min(keys))]
        return Policy("attn_only", max(left_out, default=-1) + 1, collectives, linear)
    return Policy("full")
