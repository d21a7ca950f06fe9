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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine.torch_private import tree_leaves, tree_map
from fastac.planning.timeline import Event, HeldStorage, Moment, Timeline

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


@dataclasses.dataclass(eq=False)
class Series:
    """The calls of blocks that are alike, of which those between the first two and the last two do not run."""

    names: list[str]
    # What is set on its blocks is like this, before any is called.
    plain: Any = None
    # Number of the blocks that were called, in their order.
    called: int = 0
    # Whether blocks do not run; None until the third is called.
    repeats: bool | None = None
    # Number of a block -> when its forward begins, and when backward comes to its outputs.
    forwards: dict[int, Cut] = dataclasses.field(default_factory=dict)
    backwards: dict[int, Cut] = dataclasses.field(default_factory=dict)
    # Inputs and outputs of the last block that ran, and for each input the output of the block before that it was.
    # Tensors are weak references: the model alone decides how long they live.
    _inputs: list[Any] = dataclasses.field(default_factory=list)
    _outputs: Any = None
    _sources: list[Any] = dataclasses.field(default_factory=list)

    def enter(self, name: str, block: torch.nn.Module, inputs: Any, now: Cut) -> Any:
        """A block is called. The outputs that it is to return without running; None if it has to run."""
        number, leaves = self.names.index(name), tree_leaves(inputs)
        if self.repeats is False:
            return None
        # Another order, a second call, or the model has set something on the block.
        if number != self.called or _plain(block) != self.plain:
            self._stop()
            return None
        before, self.called = self.forwards.get(2), self.called + 1
        self.forwards[number] = now
        sources = [self._source(index, leaf) for index, leaf in enumerate(leaves)]
        is_last = number == len(self.names) - 1
        if number == 2:
            # The second block got its inputs from the first in the same way, and all its outputs are inputs now.
            tensors = [leaf for leaf in tree_leaves(self._outputs) if isinstance(leaf, weakref.ref)]
            self.repeats = sources == self._sources and None not in sources and {*range(len(tensors))} <= {*sources}
            self.repeats &= all(getattr(tensor(), "requires_grad", False) for tensor in tensors)
        elif number > 2 and not is_last and (now != before or not all(map(_is, self._inputs, leaves))):
            self._stop()  # the model did something between two blocks
        self._inputs, self._sources = list(map(_remembered, leaves)), sources
        if self.repeats and number < len(self.names) - 2:
            return tree_map(lambda leaf: leaf() if isinstance(leaf, weakref.ref) else leaf, self._outputs)
        return None

    def leave(self, name: str, outputs: Any, record: Callable[[], Cut]) -> None:
        """A block has run. record: a function without arguments that makes a cut."""
        number = self.names.index(name)
        self._outputs = tree_map(_remembered, outputs)

        def arrive(gradient: torch.Tensor) -> None:
            if number not in self.backwards:
                self.backwards[number] = record()

        if self.repeats is not False and number != len(self.names) - 1:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(arrive)

    def _source(self, index: int, leaf: Any) -> int | None:
        """Which output of the block before it an input is; -1 for what that block was called with itself."""
        tensors = (out for out in tree_leaves(self._outputs) if isinstance(out, weakref.ref))
        of_output = next((number for number, tensor in enumerate(tensors) if tensor() is leaf), None)
        is_same = index < len(self._inputs) and _is(self._inputs[index], leaf)
        return -1 if of_output is None and is_same else of_output

    def _stop(self) -> None:
        if self.repeats:
            raise NotAlikeError
        self.repeats = False


def _remembered(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return weakref.ref(leaf)
    return leaf if isinstance(leaf, PLAIN) else object()  # equal to nothing


def _is(remembered: Any, leaf: Any) -> bool:
    if isinstance(remembered, weakref.ref):
        return remembered() is leaf
    return type(remembered) is type(leaf) and bool(remembered == leaf)


def series_of(
    model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], checkpointed: Collection[str]
) -> dict[str, Series]:
    """Name of a block -> its series. Blocks that are alike follow each other, and no other module has their weights."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    series: list[Series] = []
    before: Any = None
    for name, block in blocks.items():
        shares = any(uses[parameter] > 1 for parameter in block.parameters())
        likeness = (name in checkpointed, _likeness(block, name))
        if likeness == before and not shares:
            series[-1].names.append(name)
        else:
            series.append(Series([name], _plain(block)))
        before = likeness
    # The last block is left out: it always runs. Backward sums up the gradients of an input of all blocks, and autograd
    # adds the second gradient in another way than those after it, to which it has a sum of its own.
    for entry in series:
        entry.names.pop()
    return {name: entry for entry in series if len(entry.names) >= SHORTEST for name in entry.names}


def _plain(block: torch.nn.Module) -> dict[str, Any]:
    """Numbers, words and flags that are attributes of a block."""
    return {name: value for name, value in vars(block).items() if isinstance(value, PLAIN)}


def _likeness(block: torch.nn.Module, name: str) -> Any:
    """All that decides what a block does, without the values of its weights. name: may differ, wherever it stands."""

    def of(value: Any, around: Sequence[int]) -> Any:  # around: the objects that contain it
        if isinstance(value, str):
            return value.replace(name, "")
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.dtype, value.requires_grad
        if id(value) in around:
            return around.index(id(value))
        inside = (*around, id(value))
        if isinstance(value, Mapping):  # keys that are numbers are those of hooks
            return [(key if isinstance(key, str) else "", of(item, inside)) for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            return [of(item, inside) for item in value]
        if isinstance(value, (type, types.FunctionType)) or not hasattr(value, "__dict__"):
            return value
        # `FakeModel.attach` replaces `forward`.
        return type(value), [(key, of(item, inside)) for key, item in vars(value).items() if key != "forward"]

    return of(block, ())


@dataclasses.dataclass(frozen=True)
class _Section:
    """The forward of the second block of a series, then of the last but one; or backward, in the other order."""

    names: list[str]
    start: Cut
    middle: Cut
    end: Cut
    # 1 in the forward, -1 in backward.
    direction: int

    @property
    def length(self) -> int:
        """Number of events of one block."""
        return self.middle.events - self.start.events

    @property
    def flops(self) -> Counter[str]:
        """FLOPs of one block."""
        return self.middle.flops - self.start.flops

    @property
    def missing(self) -> int:
        """Number of the blocks that did not run."""
        return len(self.names) - 4

    def of_second(self, listed: Sequence[Any], recorded: str) -> Sequence[Any]:
        """What the second block added to a list. recorded: "events" or "storages"."""
        start, middle, end = (getattr(cut, recorded) for cut in (self.start, self.middle, self.end))
        second, other = (listed[start:middle], listed[middle:end])[:: self.direction]
        renamed = self._renamed(second, [self.names[1], *self.names[-2:]])
        if without_order(renamed) != without_order(other):
            raise NotAlikeError
        return second

    def of_all(self, listed: Sequence[Any], recorded: str) -> Iterator[Any]:
        """What all blocks but the first and the last would have added."""
        second = self.of_second(listed, recorded)
        for number in range(1, len(self.names) - 1)[:: self.direction]:
            yield from self._renamed(second, self.names[number - 1 : number + 2])

    def _renamed(self, items: Sequence[Any], neighbours: Sequence[str]) -> list[Any]:
        """Items of the second block as those of another. neighbours: the block before the other, itself, the next."""
        names = dict(zip((*self.names[:2], self.names[-2]), neighbours, strict=True))
        return [_with_names(item, lambda region: names.get(region, region)) for item in items]


def _with_names(item: Any, rename: Callable[[str], str]) -> Any:
    """An event or a held storage, with other names of regions."""
    changes: dict[str, Any] = {}
    if item.candidate:
        changes["candidate"] = (rename(item.candidate[0]), item.candidate[1])
    if isinstance(item, HeldStorage):
        changes["inputs_of"] = list(map(rename, item.inputs_of))
    return dataclasses.replace(item, **changes) if changes else item


def without_order(items: Sequence[Any]) -> list[Any]:
    """Events, with those that release together by their bytes: autocast drops what it has cast in any order."""
    runs = itertools.groupby(items, lambda item: item.bytes < 0)
    return [item for is_release, run in runs for item in (sorted(run, key=_by_bytes) if is_release else run)]


def _by_bytes(event: Event) -> tuple[int, str, int]:
    return event.bytes, str(event.candidate), event.change


def repeated(step: Timeline, all_series: Iterable[Series]) -> Timeline:
    """A step in which blocks of series did not run, as it is if all of them run. It takes the other step's storages.

    Raises NotAlikeError unless the last but one of each series did as the second, and in its forward and backward the
    second released as much as it allocated, but for gradients.
    """
    events: list[Event] = []
    storages: list[HeldStorage] = []
    flops, candidates = Counter(step.flops), dict(step.candidates)
    sections = [section for series in all_series if series.repeats for section in _sections(step, series)]
    if not sections:
        return step
    done = Cut(0, 0, Counter())
    for section in sorted(sections, key=lambda section: section.start.events):
        if section.start.events < done.events:
            raise NotAlikeError  # the blocks of two series alternate
        events += [*step.events[done.events : section.start.events], *section.of_all(step.events, "events")]
        storages += [*step.storages[done.storages : section.start.storages], *section.of_all(step.storages, "storages")]
        flops.update({phase: count * section.missing for phase, count in section.flops.items()})
        done = section.end
    events += step.events[done.events :]
    storages += step.storages[done.storages :]

    def moved(moment: Moment, added: Sequence[tuple[_Section, int]]) -> Moment:
        """A moment, after so many repetitions of a block's part of sections."""
        return Moment(
            moment.event + sum(section.length * count for section, count in added),
            moment.flops + sum(section.flops.total() * count for section, count in added),
        )

    def behind(moment: Moment) -> Moment:
        return moved(
            moment, [(section, section.missing) for section in sections if section.middle.events <= moment.event]
        )

    begins = {region: list(map(behind, moments)) for region, moments in step.begins.items()}
    for section in sections:
        names, index = section.names, 0 if section.direction > 0 else 1
        for number in range(2, len(names) - 2):
            candidates[names[number]] = [dataclasses.replace(candidate) for candidate in step.candidates[names[1]]]
            for moment in begins[names[1]][index : index + 1]:
                begins[names[number]].append(moved(moment, [(section, section.direction * (number - 1))]))
    return Timeline(events, behind(Moment(step.forward_ends, 0)).event, flops, candidates, begins, storages)


def _sections(step: Timeline, series: Series) -> list[_Section]:
    """The forward and the backward of a series, if its blocks can be repeated."""
    names, last = series.names, len(series.names) - 1
    if last not in series.forwards or not series.backwards.keys() >= {0, 1, last - 1}:
        raise NotAlikeError
    of_forward, of_backward = series.forwards, series.backwards
    forward = _Section(names, of_forward[1], of_forward[2], of_forward[last], 1)
    backward = _Section(names, of_backward[last - 1], of_backward[1], of_backward[0], -1)
    sections = [forward, backward]
    in_forward, in_backward = (section.of_second(step.events, "events") for section in sections)
    of_second = [*in_forward, *in_backward]
    between = step.events[forward.end.events : backward.start.events]
    after = step.events[backward.end.events :]
    outside = [*step.storages[: forward.start.storages], *step.storages[forward.end.storages :]]
    for storage in outside:  # inputs of all blocks
        if names[1] in storage.inputs_of:
            index = storage.inputs_of.index(names[1]) + 1
            if storage.inputs_of[index : index + 1] != names[-2:-1]:
                raise NotAlikeError
            storage.inputs_of[index:index] = names[2:-2]
    # What the forward of a block allocates and its backward does not release, such as weights that autocast has cast.
    longer = {id(event): event for event in in_forward if event.bytes > 0}
    for section in sections:
        for event in step.events[section.start.events : section.end.events]:
            longer.pop(id(event.ends), None)
    lasting = sum(event.bytes for event in longer.values())
    is_alike = (
        step.candidates[names[1]] == step.candidates[names[-2]]
        and all(section.end.flops - section.middle.flops == section.flops for section in sections)
        and sum(event.bytes for event in of_second if not event.gradient) == lasting
        and all(event.candidate is None or event.candidate[0] != names[1] for event in between)
        and all(event.candidate is None or event.candidate[0] != names[-2] for event in after)
    )
    if not is_alike:
        raise NotAlikeError
    for event in (*between, *after):
        if id(event.ends) in longer:
            event.bytes *= 1 + forward.missing  # at once for all blocks
    return sections
