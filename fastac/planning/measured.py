"""A step that was measured, as a `Forecast`: the bytes and the FLOPs that it would have had under other policies.

The allocator said what was allocated when each region began, in forward and in recompute, and what was the most so far.
Between two such moments a block holds what stays, and for a while what its backward takes. The rest is arithmetic: a
saved output is held from its forward until the backward of its block is done.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fastac.engine.device_memory import seconds
from fastac.engine.measurement import MeasuredRegion, MeasuredStep
from fastac.planning.forecast import Forecast, States
from fastac.planning.timeline import EXCHANGED, Candidate, Event, HeldStorage, Moment, Timeline, block_name
from fastac.policy import AnyPolicy

SAMPLED = 1.25
"""The allocator is read whenever backward asks for a saved tensor. A block takes more in between, but not so much."""


class MeasuredForecast(Forecast):
    """Steps of a model on inputs of one signature, from one step that was measured under full checkpointing.

    Bytes are all that the device has allocated: weights, states of the optimizer and other models are among them.

    Args:
        measurement: its backward has ended.
        names: block -> its name.
        taken: bytes that are allocated when a step begins, if nobody counts them.
        had_gradients: gradients of parameters were among them.
    """

    def __init__(self, measurement: MeasuredStep, names: Mapping[Any, str], taken: int, had_gradients: bool) -> None:
        self.measurement, self.gradient_shards, self.states = measurement, 1, States(0, 0)
        calls = Counter[str]()
        # Region -> its name, as a timeline has it.
        self._regions: dict[MeasuredRegion, str] = {}
        for region in measurement.regions:
            name = names[region.block]
            calls[name] += 1
            self._regions[region] = name if calls[name] == 1 else f"{name}#{calls[name]}"
        self.blocks = {block_name(name): region.block for region, name in self._regions.items() if region.block}
        self.base = measurement.began.level if measurement.is_counted else taken
        self._gradients = {region: region.gradients * (not had_gradients) for region in self._regions}
        self.gradients = sum(self._gradients.values())
        self._steps, self._policies, self._is_careful = {}, {}, False
        self._find_heights()
        self._find_flops()

    def of_step(self, *, has_gradients: bool, is_first: bool = False) -> MeasuredForecast:
        """The same, of a step that begins beside gradients, or for the first choice.

        For the first choice, what backward holds counts only at the moments at which the allocator was read.
        """
        forecast = copy.copy(self)
        forecast._steps, forecast._is_careful = {}, is_first
        if has_gradients:  # the step does not allocate them
            forecast.gradients, forecast.gradient_shards = 0, sys.maxsize
        return forecast

    def step(self, policy: AnyPolicy) -> Timeline:
        """The step with full checkpointing of all blocks, or of none."""
        names = self._checkpointed(policy)
        if names not in self._steps:
            self._steps[names] = self._timeline(is_checkpointed=bool(names))
        return self._steps[names]

    def _find_heights(self) -> None:
        """Find by how many bytes each block grows what is allocated, and what its backward takes besides."""
        step = self.measurement
        # Region -> bytes that stay after its forward, and after its backward; and what backward takes for a while.
        self._stays: dict[MeasuredRegion, int] = {}
        self._remains: dict[MeasuredRegion, int] = {}
        self._takes: dict[MeasuredRegion, int] = {}
        # What the model takes between the last forward of a block and the first backward.
        self._head = 0
        begins = [region.began for region in self._regions]
        for region, began, ended in zip(self._regions, begins, [*begins[1:], step.ended], strict=True):
            self._stays[region] = ended.level - began.level if step.is_counted else region.inputs
        again = [region.recompute for region in step.recomputed]
        for region, began, ended in zip(step.recomputed, again, [*again[1:], step.after], strict=True):
            if not step.is_counted:
                self._remains[region] = self._gradients[region] - self._stays[region]
                self._takes[region] = region.packed + 2 * region.largest
                continue
            self._remains[region] = ended.level - began.level
            # What came back from the host is in the level already.
            bound = ended.peak - began.allocated - max(0, began.away - ended.away)
            sampled = max(region.highest - began.allocated, 0)
            # The most of the step so far was reached here, or earlier: then it is only a bound.
            self._takes[region] = bound if ended.peak > began.peak else int(min(bound, sampled * SAMPLED))
        if again and again[0].peak > step.ended.peak:
            self._head = again[0].peak - step.ended.allocated

    def _find_flops(self) -> None:
        """Find what each region and call takes: FLOPs; or the time, in FLOPs that the device does in it."""
        calls = [call for region in self._regions for call in region.calls]
        self._work: dict[Any, float] = {call: call.flops for call in calls}
        self._work |= {region: sum(call.flops for call in region.calls) for region in self._regions}
        step, flops = self.measurement, sum(call.flops for call in calls)
        # FLOP/s of the device in the forward; 0 if nothing ran that has FLOPs.
        self.speed = flops / seconds(step.began_at, step.ended_at)
        if not step.times_kernels or not flops:
            return
        # Kernels start slowly in their first calls: of equal calls, and of equal regions, the fastest counts.
        fastest: dict[object, float] = {}
        items: list[tuple[Any, object, Any, Any]] = [(call, call.likeness, *call.times) for call in calls if call.times]
        items += [(region, _kind(region), region.began_at, region.ended_at) for region in self._regions]
        for _, kind, began, ended in items:
            took = seconds(began, ended)
            fastest[kind] = min(took, fastest.get(kind, took))
        self.speed = flops / sum(fastest[_kind(region)] for region in self._regions)
        self._work |= {item: fastest[kind] * self.speed for item, kind, _, _ in items}

    def _timeline(self, is_checkpointed: bool) -> Timeline:
        """The step with full checkpointing, or with none."""
        events, flops = [Event(self.base)], Counter[str]()
        begins = dict[str, list[Moment]]()
        candidates = {name: self._candidates(region, is_checkpointed) for region, name in self._regions.items()}
        storages = [
            HeldStorage(size, inputs_of=[name]) for region, name in self._regions.items() for size in region.leaving
        ]
        for region, name in self._regions.items():
            begins[name] = [Moment(len(events), flops.total())]
            stays = self._stays[region] if is_checkpointed else max(self._stays[region], region.packed)
            events += [Event(0), Event(stays)]
            flops["forward"] += int(self._work[region])
            for index, candidate in enumerate(candidates[name]):
                events.append(Event(0, (name, index), candidate.bytes))
                storages.append(HeldStorage(candidate.bytes, candidate=(name, index)))
        events.append(Event(0))
        forward_ends = len(events)
        events += [Event(self._head), Event(-self._head)]
        for region in self.measurement.recomputed:
            name, takes, remains = self._regions[region], self._takes[region], self._remains[region]
            if is_checkpointed:
                begins[name].append(Moment(len(events), flops.total()))
                left_out = sum(self._work[call] for call in region.calls if call.number > region.reached)
                flops["recompute"] += int(self._work[region] - left_out)
            else:
                freed = max(self._stays[region], region.packed) - self._stays[region]
                takes, remains = max(0, takes - region.packed), remains - freed
            flops["backward"] += int(2 * self._work[region])
            gradients = self._gradients[region]
            # A saved output is not made again, if backward would hold what recompute made.
            kept = [
                ((name, index), call.kept if call.is_shared and not self._is_careful else 0, call.bytes)
                for index, call in enumerate(region.calls if is_checkpointed else ())
            ]
            events += [Event(0), *(Event(0, place, -size) for place, size, _ in kept), Event(takes), Event(-takes)]
            events += [Event(0, place, size - saved) for place, size, saved in kept]
            events += [Event(remains - gradients), Event(gradients, gradient=True)]
        return Timeline(events, forward_ends, flops, candidates, begins, storages)

    def _candidates(self, region: MeasuredRegion, is_checkpointed: bool) -> list[Candidate]:
        """The outputs of a region that could be saved."""
        if not is_checkpointed or region not in self._remains:
            return []
        found = []
        for call in region.calls:
            name = EXCHANGED if call.kind == "exchange" else "" if call.is_written and not call.keys else call.name
            flops = int(self._work[call]) if call.number <= region.reached else 0
            found.append(Candidate(name, call.bytes, flops, call.keys))
        return found


def _kind(region: MeasuredRegion) -> object:
    """Equal for regions that do the same."""
    return type(region.block), tuple(call.likeness for call in region.calls)
