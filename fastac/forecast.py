"""What any policy holds and recomputes on one model and one size of inputs, from two simulations of a step."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from fastac import budget, shares
from fastac.events import EXCHANGED, Candidate, Place, Split
from fastac.plans import PolicyPlan
from fastac.policy import Policy
from fastac.subjects import Subject, simulated
from fastac.survey import Survey
from fastac.timeline import Timeline


def block_of(region: str) -> str:
    """The name of the block that a region is a call of."""
    return region.partition("#")[0]


class Forecast:
    """A model's step, simulated without and with full checkpointing: what is common to all policies.

    states: bytes on the device besides what the step allocates. gpus: among how many gradients are sharded.
    """

    def __init__(self, subject: Subject, states: int = 0, gpus: int = 1, split: Split = Split()) -> None:  # noqa: B008
        self.subject, self.states, self.gpus, self.split = subject, states, gpus, split

    def was_simulated(self, checkpoints: bool) -> bool:
        """Whether a step without checkpointing, or under full checkpointing, was simulated already."""
        return ("full" if checkpoints else "plain") in vars(self)

    @functools.cached_property
    def plain(self) -> Timeline:
        """A step without checkpointing."""
        return simulated(self.subject, False, self.split)

    @functools.cached_property
    def full(self) -> Timeline:
        """A step under full checkpointing."""
        return simulated(self.subject, True, self.split)

    @property
    def candidates(self) -> Mapping[str, Sequence[Candidate]]:
        """What each block could save, by its name."""
        return self.full.candidates

    def outputs(self) -> dict[str, list[budget.Output]]:
        """The same, as a budget takes it."""
        found: dict[str, list[budget.Output]] = {}
        for region, candidates in self.candidates.items():
            found.setdefault(block_of(region), []).extend(
                budget.Output(one.name, one.bytes, one.flops, one.keys)
                for one in candidates
                if one.name not in ("", EXCHANGED)
            )
        return found

    def places(self, saves: Callable[[str, Candidate], bool]) -> list[Place]:
        """The candidates for which a function says that they are saved."""
        return [
            (region, place)
            for region, found in self.candidates.items()
            for place, one in enumerate(found)
            if saves(block_of(region), one)
        ]

    def of_policies(self, policies: Mapping[str, Policy]) -> list[Place]:
        """What is saved where every block has a policy."""

        def saves(block: str, one: Candidate) -> bool:
            policy = policies[block]
            if one.keys:
                return policy.saves(one.keys)
            if one.name == EXCHANGED:
                return policy.saves_collectives
            return any(fnmatch.fnmatchcase(one.name, pattern) for pattern in policy.linear) and one.name != ""

        return self.places(saves)

    def without_checkpointing(self) -> PolicyPlan:
        """The plan of training without checkpointing."""
        total = sum(self.plain.flops.values())
        peak = self.states + self.plain.peak(gradient_shards=self.gpus)
        return PolicyPlan("none", 0, self.plain.held(), peak, 0, total, total / sum(self.full.flops.values()))

    def plan(self, name: str, saved: Collection[Place]) -> PolicyPlan:
        """The plan of a policy that saves so many candidates."""
        full = sum(self.full.flops.values())
        recomputed = self.full.recomputed(saved)
        total = full - self.full.recomputed() + recomputed
        return PolicyPlan(
            policy=name,
            saved_bytes=sum(self.candidates[block][place].bytes for block, place in saved),
            held_bytes=self.full.held(saved),
            peak_bytes=self.states + self.full.peak(saved, self.gpus),
            recomputed_flops=recomputed,
            flops=total,
            relative=total / full,
        )

    def budgeted(self, policy: Policy) -> dict[str, Policy]:
        """What every block saves under a budget."""
        surveys = {block: Survey(dict(enumerate(outputs))) for block, outputs in self.outputs().items()}
        for region, found in self.candidates.items():
            surveys[block_of(region)].communicated += sum(one.bytes for one in found if one.name == EXCHANGED)
        for survey in surveys.values():
            survey.reached = len(survey.found)
        return shares.share_out(policy, surveys)

    def every_second_product(self) -> list[Place]:
        """What torchtitan's selective checkpointing by op saves: attention, and every second matrix product."""
        saved = []
        for block, found in self.candidates.items():
            products = 0
            for place, one in enumerate(found):
                if one.name == EXCHANGED:
                    continue
                products += not one.keys
                if one.keys or products % 2:
                    saved.append((block, place))
        return saved
