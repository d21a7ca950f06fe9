"""Blocks that are alike: the simulation of a step runs five of them, and repeats what happened in the second.

A series is blocks that are built alike, of which each is called with the outputs of the block before it. The first two
and the last two run, and so does the block after them. A block between them returns what the second returned, so the
last two follow as if there were no others. Afterwards the events of the second block are repeated for each block that
did not run: its part of the forward, and its part of backward. The last but one shows whether that is right: it must
have done as the second.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine.torch_private import tree_leaves, tree_map
from fastac.planning.timeline import HeldStorage, Moment, Timeline

SHORTEST = 5
"""Blocks of the shortest series of which one does not run."""

PLAIN = (bool, int, float, str, types.NoneType)


class NotAlikeError(Exception):
    """Blocks of a series turned out to do different things: all have to run."""


class Cut(NamedTuple):
    """What a simulation has recorded up to a moment: number of events and of held storages, FLOPs of each phase."""

    events: int
    storages: int
    flops: Counter[str]


class _TensorRef(weakref.ref[torch.Tensor]):
    """A tensor. The model alone decides how long it lives. Equal to other references to this very tensor."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorRef) and self() is not None and self() is other()


@dataclasses.dataclass(eq=False)
class Series:
    """The calls of blocks that are alike, of which those between the first two and the last two do not run."""

    names: list[str]
    # Whether blocks do not run; None until the third is called.
    repeats: bool | None = None
    # When the forward of each block begins, in the order of the calls.
    forwards: list[Cut] = dataclasses.field(default_factory=list)
    # Number of a block -> when backward comes to its outputs.
    backwards: dict[int, Cut] = dataclasses.field(default_factory=dict)
    # What the latest block was called with, and the outputs of the latest block that ran.
    _inputs: list[Any] = dataclasses.field(default_factory=list)
    _outputs: Any = None

    def enter(self, name: str, block: torch.nn.Module, inputs: Any, now: Cut) -> Any:
        """A block is called. The outputs that it is to return without running; None if it has to run."""
        if self.repeats is False:
            return None
        number, last, before = self.names.index(name), len(self.names) - 1, self._inputs
        is_alike = number == len(self.forwards)  # no other order, and no second call
        self.forwards.append(now)
        outputs = [leaf for leaf in tree_leaves(self._outputs) if not isinstance(leaf, PLAIN)]
        # The model may have set numbers, words and flags on the block, just now.
        attributes = [item for item in vars(block).items() if isinstance(item[1], PLAIN)]
        leaves = map(_remembered, tree_leaves((inputs, attributes)))
        # An output of the block before is the same input of each block. The other inputs are the same tensors.
        self._inputs = [(outputs.index(leaf),) if leaf in outputs else leaf for leaf in leaves]
        if is_alike and 2 <= number < last:
            used = all((index,) in self._inputs and out().requires_grad for index, out in enumerate(outputs))
            # Since the third block was called nothing ran: the model does nothing between two blocks.
            is_alike = used and self._inputs == before and now == self.forwards[2]
        if self.repeats and not is_alike:
            raise NotAlikeError
        if number == 2 or not is_alike:
            self.repeats = is_alike
        return tree_map(_alive, self._outputs) if self.repeats and number < last - 1 else None

    def leave(self, name: str, outputs: Any, record: Callable[[], Cut]) -> None:
        """A block has run. record: a function without arguments that makes a cut."""
        number = self.names.index(name)
        self._outputs = tree_map(_remembered, outputs)

        def arrive(gradient: torch.Tensor) -> None:
            self.backwards.setdefault(number, record())

        for leaf in tree_leaves(outputs):
            if self.repeats is not False and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(arrive)


def _remembered(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _TensorRef(leaf)
    return leaf if isinstance(leaf, PLAIN) else object()  # equal to nothing


def _alive(remembered: Any) -> Any:
    return remembered() if isinstance(remembered, _TensorRef) else remembered


def series_of(
    model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], checkpointed: Collection[str]
) -> dict[str, Series]:
    """Name of a block -> its series. Blocks that are alike follow each other, and no other module has their weights."""
    uses: Counter[torch.Tensor] = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))

    def likeness(name: str) -> Any:
        return name in checkpointed, _likeness(blocks[name], name, uses)

    # The last block is left out: it always runs. Backward sums up the gradients of an input of all blocks, and autograd
    # adds the second gradient in another way than those after it, to which it has a sum of its own.
    groups = ([*names][:-1] for _, names in itertools.groupby(blocks, likeness))
    all_series = [Series(names) for names in groups if len(names) >= SHORTEST]
    return {name: series for series in all_series for name in series.names}


def _likeness(block: torch.nn.Module, name: str, uses: Counter[torch.Tensor]) -> Any:
    """All that decides what a block does, without the values of its weights. name: may differ, wherever it stands.

    uses: how often the model has a parameter. A block is like no other if one of its parameters is there twice.
    """
    met: dict[int, int] = {}  # the id of each object in the block -> its number

    def of(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(name, "")
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.dtype, value.requires_grad, name if uses[value] > 1 else ""
        if isinstance(value, (list, tuple)):
            return list(map(of, value))
        if isinstance(value, Mapping):  # keys that are numbers are those of hooks
            return [(key if isinstance(key, str) else "", of(item)) for key, item in value.items()]
        if isinstance(value, (type, types.FunctionType, types.ModuleType)) or not hasattr(value, "__dict__"):
            return value
        if id(value) in met:
            return met[id(value)]
        met[id(value)] = len(met)
        # `FakeModel.attach` replaces `forward`.
        return type(value), of({key: item for key, item in vars(value).items() if key != "forward"})

    return of(block)


class _Section(NamedTuple):
    """A part of the step that came to the second block and then to the last but one; or the other way, in backward."""

    # All blocks, in the order in which this part comes to them if all run.
    names: list[str]
    # It came to the first of the two, to the other, and to the block after that.
    start: Cut
    middle: Cut
    end: Cut

    def later(self, moment: Moment, blocks: int) -> Moment:
        """A moment, if so many blocks more come before it."""
        events, flops = self.middle.events - self.start.events, self.middle.flops - self.start.flops
        return Moment(moment.event + blocks * events, moment.flops + blocks * flops.total())

    def of_all(self, listed: Sequence[Any], recorded: str) -> list[Any]:
        """What all blocks but the first and the last add to a list. recorded: "events" or "storages"."""
        names = self.names
        start, middle, end = (getattr(cut, recorded) for cut in (self.start, self.middle, self.end))

        def renamed(*neighbours: str) -> list[Any]:
            """What the first added, as another block would. neighbours: the block before that, itself, the next."""
            regions = dict(zip((*names[:2], names[-2]), neighbours, strict=True))
            return [_with_names(item, regions) for item in listed[start:middle]]

        if without_order(renamed(names[1], *names[-2:])) != without_order(listed[middle:end]):
            raise NotAlikeError
        return [item for number in range(1, len(names) - 1) for item in renamed(*names[number - 1 : number + 2])]


def _with_names(item: Any, regions: Mapping[str, str]) -> Any:
    """An event or a held storage, with other names of regions."""
    place = item.candidate and (regions.get(item.candidate[0], item.candidate[0]), item.candidate[1])
    if isinstance(item, HeldStorage):
        return HeldStorage(item.bytes, [regions.get(region, region) for region in item.inputs_of], place)
    return dataclasses.replace(item, candidate=place) if place else item


def without_order(items: Sequence[Any]) -> list[Any]:
    """The events, with each run of releases in one order: autocast drops what it has cast in any order."""
    runs = itertools.groupby(items, lambda item: item.bytes < 0)
    return [item for is_release, run in runs for item in (sorted(run, key=repr) if is_release else run)]


def repeated(step: Timeline, all_series: Iterable[Series]) -> Timeline:
    """A step in which blocks of series did not run, as it is if all of them run. The other step is not to be used then.

    Raises NotAlikeError unless the last but one of each series did as the second, and in its forward and backward the
    second released as much as it allocated, but for gradients.
    """
    sections = [section for series in all_series if series.repeats for section in _sections(step, series)]
    sections.sort(key=lambda section: section.start.events, reverse=True)
    if any(before.end.events > after.start.events for after, before in itertools.pairwise(sections)):
        raise NotAlikeError  # the blocks of two series alternate
    events, storages, flops, candidates = [*step.events], [*step.storages], step.flops, dict(step.candidates)
    forward_ends = [Moment(step.forward_ends, 0)]
    begins = {region: [*moments] for region, moments in step.begins.items()}
    for section in sections:  # from the last to the first: what is before a section stays where it is
        names, start, middle, end = section
        missing = len(names) - 4
        events[start.events : end.events] = section.of_all(events, "events")
        storages[start.storages : end.storages] = section.of_all(storages, "storages")
        flops.update({phase: missing * count for phase, count in (middle.flops - start.flops).items()})
        for moments in (forward_ends, *begins.values()):
            moments[:] = [section.later(moment, missing * (moment.event >= middle.events)) for moment in moments]
        first = [moment for moment in begins[names[1]] if start.events <= moment.event < middle.events]
        for number, name in enumerate(names[2:-2], 1):
            begins[name][:0] = [section.later(moment, number) for moment in first]
            candidates[name] = candidates[names[1]]
    return Timeline(events, forward_ends[0].event, flops, candidates, begins, storages)


def _sections(step: Timeline, series: Series) -> list[_Section]:
    """The forward and the backward of a series, if its blocks can be repeated."""
    names, last, forwards, backwards = series.names, len(series.names) - 1, series.forwards, series.backwards
    if len(forwards) <= last or not backwards.keys() >= {0, 1, last - 1}:
        raise NotAlikeError
    forward = _Section(names, forwards[1], forwards[2], forwards[last])
    backward = _Section(names[::-1], backwards[last - 1], backwards[1], backwards[0])
    sections = [forward, backward]
    for storage in step.storages[: forward.start.storages]:
        if names[1] in storage.inputs_of:  # an input of all blocks
            index = storage.inputs_of.index(names[1]) + 1
            storage.inputs_of[index:index] = names[2:-2]
    in_forward, in_backward = (step.events[start.events : middle.events] for _, start, middle, _ in sections)
    between = step.events[forward.end.events : backward.start.events]
    after = step.events[backward.end.events :]
    # What the forward of a block allocates and its backward does not release, such as weights that autocast has cast.
    released = {id(event.ends) for _, start, _, end in sections for event in step.events[start.events : end.events]}
    longer = {id(event) for event in in_forward if event.bytes > 0 and id(event) not in released}
    others = [event for event in (*in_forward, *in_backward) if not event.gradient and id(event) not in longer]
    is_alike = (
        step.candidates[names[1]] == step.candidates[names[-2]]
        and all(end.flops - middle.flops == middle.flops - start.flops for _, start, middle, end in sections)
        and sum(event.bytes for event in others) == 0
        and names[1] not in {event.candidate[0] for event in between if event.candidate}
        and names[-2] not in {event.candidate[0] for event in after if event.candidate}
    )
    if not is_alike:
        raise NotAlikeError
    for event in (*between, *after):
        if id(event.ends) in longer:
            event.bytes *= len(names) - 3  # at once for all blocks
    return sections
