"""One training step of a model without weights: every allocation, and every operation that has FLOPs, in their order.

The model and its inputs are fake tensors, which have shapes and no memory. Each storage that an operation returns is an
event, and its end is another. Of every block it is known which outputs could be saved, when they go in the forward, and
when recompute makes them again: from one simulation of full checkpointing `fastac.planning.timeline` reads what any
policy holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.engine import flops, torch_private
from fastac.engine.blocks import block_of
from fastac.engine.interception import LINEAR_OPS
from fastac.engine.releases import WHOLE_PRODUCT
from fastac.engine.tape import is_differentiable
from fastac.engine.torch_private import tree_leaves
from fastac.errors import FastacError
from fastac.planning.known_values import KnownValues
from fastac.planning.timeline import Candidate, Event, Kept, Moment, Place, Timeline
from fastac.registry import classify
from fastac.registry.torch_private import arguments_of

EXCHANGED = "exchanged"
"""The candidate that stands behind an attention under context parallelism: what its collectives return."""


@dataclasses.dataclass(frozen=True)
class Split:
    """One rank of Ulysses context parallelism: what is simulated is its part of the tokens.

    Attention over the `tokens` of the video that the rank has, or more, is over those of all `ranks`, with its part of
    the heads: as many bytes, more FLOPs. Query, key, value and output go through an all-to-all each.
    """

    ranks: int = 1
    tokens: int = 0

    def keys(self, keys: int) -> int:
        """Over how many keys an attention is that is simulated over so many."""
        return keys + (self.ranks - 1) * self.tokens if self.concerns(keys) else keys

    def concerns(self, keys: int) -> bool:
        """Whether an attention over so many keys is over the video, and not the text alone."""
        return self.ranks > 1 and keys >= self.tokens


LINEAR_PRODUCTS = tuple(f"{name.replace('::', '.')}.default" for name in LINEAR_OPS)

GENERATOR_STATE = torch.get_rng_state().nbytes
"""Bytes that torch's checkpoint keeps of the CPU's random number generator for every block."""


@dataclasses.dataclass(eq=False)
class _Storage:
    """A storage and the candidate it is a part of. copied: what would be kept is a copy, since nobody guards it.

    replayed: recompute makes it, and would be handed what was saved. region: that ends with it. kept: it is an input of
    a region.
    """

    event: Event
    candidate: Place | None = None
    copied: bool = False
    gone: bool = False
    replayed: bool = False
    region: str = ""
    kept: Kept | None = None


class Meter(TorchDispatchMode):
    """Notes every allocation and every operation that has FLOPs while it is on."""

    def __init__(self, outside: Sequence[torch.Tensor], known: KnownValues, split: Split) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.split = known, split
        self.events: list[Event] = []
        self.flops: Counter[str] = Counter()  # by phase
        self.candidates: dict[str, list[Candidate]] = {}
        self.forward_ends: int | None = None  # how many events the forward had
        self.begins: dict[str, list[Moment]] = {}  # by region: of its forward, and of its recompute
        self.kept: list[Kept] = []
        self.region = ""  # that runs, in forward or recompute
        self.linear = ""  # the Linear module that runs
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._alive: dict[int, _Storage] = {}
        self._parts: dict[Place, list[_Storage]] = {}  # of the candidates
        self._held: dict[str, Counter[Place]] = {}  # by what is saved of a region, above full checkpointing
        self._repeated: dict[str, int] = {}  # how many candidates of a block recompute has come to

    @property
    def forwards(self) -> bool:
        """Whether the forward runs."""
        return self.forward_ends is None

    def hold(self, size: int, owner: object, region: str) -> None:
        """So many bytes, which no operation returns, are alive as long as the owner, as is what a region saves."""
        event = Event(size)
        self.events.append(event)
        self._alive[-id(owner)] = _Storage(event, region=region)  # the addresses of storages are above 0
        weakref.finalize(owner, self._free, -id(owner)).atexit = False

    def begin(self, region: str) -> None:
        """A region begins its forward, or its recompute."""
        self.candidates.setdefault(region, [])
        self.begins.setdefault(region, []).append(Moment(len(self.events), self.flops.total()))
        self.events.append(Event(0))

    def take_inputs(self, region: str, inputs: Iterable[Any]) -> None:
        """A region keeps its inputs; those that were there before the step are not noted."""
        tensors = (one for one in inputs if isinstance(one, torch.Tensor) and torch_private.has_storage(one))
        for address in dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors):
            if (storage := self._alive.get(address)) is not None:
                if storage.kept is None:
                    storage.kept = Kept(storage.event.bytes)
                    self.kept.append(storage.kept)
                storage.kept.inputs_of.append(region)

    def end_forward(self) -> None:
        """The forward has ended."""
        self.events.append(Event(0))
        self.forward_ends = len(self.events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = self.known.run(func, args, kwargs)
        if self.forwards and getattr(getattr(func, "_schema", None), "is_mutable", False):
            self._leave_out_written(func, args, kwargs)
        recomputes = not self.forwards and torch_private.in_recompute()
        count, keys = flops.of_call(func, args, kwargs, outputs), flops.keys_of_call(func, args, kwargs)
        if count:
            count = count * self.split.keys(keys) // keys if keys else count
            self.flops["forward" if self.forwards else "recompute" if recomputes else "backward"] += count
        guarded = is_differentiable(args) and (self.linear == "" or str(func) == WHOLE_PRODUCT)
        place = self._place(func, keys, count) if self.region and (self.forwards or recomputes) else None
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and torch_private.has_storage(tensor):
                self._see(tensor.untyped_storage(), place, copied=self.forwards and not guarded)
        return outputs

    def _place(self, func: Any, keys: int, count: int) -> Place | None:
        """The candidate that was called: a new one, or the one that recompute has come to."""
        resolved = classify(func)
        attends = resolved is not None and resolved.is_attention
        if not attends and not (self.linear and str(func) in LINEAR_PRODUCTS):
            return None
        mine = self.candidates.setdefault(self.region, [])
        if self.forwards:
            mine.append(Candidate(str(func) if attends else self.linear, self.split.keys(keys)))
            self.linear = self.linear if attends else ""
            number = len(mine) - 1
            if attends and self.split.concerns(keys):
                mine.append(Candidate(EXCHANGED))
        else:
            number = self._repeated.get(self.region, 0)
            number += mine[number].name == EXCHANGED
            self._repeated[self.region] = number + 1
            mine[number].flops = count
        return self.region, number

    def _leave_out_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A product that is changed in place cannot be replayed: no policy may name its Linear module."""
        arguments = arguments_of(func)
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        for argument in arguments:
            tensor = given.get(argument.name) if argument.written else None
            if not isinstance(tensor, torch.Tensor) or not torch_private.has_storage(tensor):
                continue
            storage = self._alive.get(tensor.untyped_storage()._cdata)
            if storage is not None and storage.candidate is not None and not storage.copied:
                region, place = storage.candidate
                if not self.candidates[region][place].keys:
                    self.candidates[region][place].name = ""

    def _see(self, storage: torch.UntypedStorage, place: Place | None, copied: bool) -> None:
        address = storage._cdata
        if address in self._outside or address in self._alive:
            return
        event = Event(storage.nbytes())
        mine = self._alive[address] = _Storage(event)
        if place is not None and self.forwards:
            mine.candidate, mine.copied = place, copied
            self._parts.setdefault(place, []).append(mine)
            if copied:
                self._keep(event, place, storage.nbytes())
                self.kept.append(Kept(storage.nbytes(), candidate=place))
            if len(self._parts[place]) == 1:
                self._exchange(place, storage.nbytes())
        elif place is not None:
            self._replay(mine, place)
        self.events.append(event)
        weakref.finalize(storage, self._free, address).atexit = False

    def _keep(self, event: Event, place: Place, size: int) -> None:
        self._change(event, place, size)
        self.candidates[place[0]][place[1]].bytes += size

    def _change(self, event: Event, place: Place, change: int) -> None:
        event.candidate, event.change = place, change
        held = self._held.setdefault(place[0], Counter())
        held[place] += change

    def _replay(self, mine: _Storage, place: Place) -> None:
        """A part of a candidate is made again, which it would not be if that were saved."""
        kept = self._parts[place].pop(0)
        if kept.gone and not kept.copied:  # of a copy another copy is handed out
            self._change(mine.event, place, -mine.event.bytes)
            mine.replayed = True

    def _exchange(self, place: Place, size: int) -> None:
        """The collectives of an attention return as much as itself, each: for query, key, value and output."""
        region, after = place[0], place[1] + 1
        mine = self.candidates[region]
        if after < len(mine) and mine[after].name == EXCHANGED:
            mine[after].bytes = 4 * size
            self.kept += [Kept(size, candidate=(region, after)) for _ in range(4)]
            event = Event(0)
            self._change(event, (region, after), 4 * size)
            self.events.append(event)

    def _free(self, address: int) -> None:
        mine = self._alive.pop(address, None)
        if mine is None:
            return  # the step is over
        mine.gone = True
        for place, held in self._held.pop(mine.region, {}).items():
            self.events.append(Event(0, place, -held))
        event = Event(-mine.event.bytes, gradient=mine.event.gradient)
        if (
            mine.candidate is not None
            and not mine.copied
            and self._repeated.get(mine.candidate[0], 0) <= mine.candidate[1]
        ):
            self._keep(event, mine.candidate, mine.event.bytes)
            if mine.kept is not None:
                mine.kept.candidate = mine.candidate
            elif self.forwards:  # else somebody else holds it, too
                self.kept.append(Kept(mine.event.bytes, candidate=mine.candidate))
        elif mine.replayed and mine.event.candidate is not None:
            self._change(event, mine.event.candidate, mine.event.bytes)
        self.events.append(event)

    def leave_out(self, region: str) -> None:
        """Nothing of a region is a candidate."""
        for storage in self._alive.values():
            if storage.candidate is not None and storage.candidate[0] == region:
                storage.candidate = None
        self.candidates[region] = []

    def finish(self, parameters: Iterable[torch.nn.Parameter]) -> Timeline:
        """What was simulated. What is still alive stays so; the gradients of parameters among it are known as such."""
        for parameter in parameters:
            if parameter.grad is not None and (found := self._alive.get(parameter.grad.untyped_storage()._cdata)):
                found.event.gradient = True
        self._alive.clear()
        return Timeline(self.events, self.forward_ends or 0, self.flops, self.candidates, self.begins, self.kept)


def simulate(
    model: torch.nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    blocks: Mapping[str, torch.nn.Module],
    attach: Callable[[Callable[..., Any]], None],
    checkpointed: Collection[str],
    known: KnownValues,
    split: Split,
) -> Timeline:
    """One forward and backward of the mean square of a model's outputs; all tensors are fake.

    blocks: by name. attach: makes the model call a function in the place of each block, with the block and its inputs.
    checkpointed: names of those that are, fully. known: values of inputs. split: whose rank this is.
    """
    names = {block: name for name, block in blocks.items()}
    outside = [*model.parameters(), *model.buffers(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    meter = Meter(outside, known, split)
    meter.candidates = {name: [] for name in blocks}
    calls: Counter[str] = Counter()

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        name = names[block_of(block)]  # type: ignore[index]
        if torch_private.innermost_checkpoint() or not torch.is_grad_enabled():
            raise FastacError(f"plan: {name!r} runs in a checkpoint of the model's own. Switch that off.")
        calls[name] += 1
        region = name if calls[name] == 1 else f"{name}#{calls[name]}"
        run = functools.partial(_run, meter, region, block)
        if name in checkpointed:
            meter.hold(GENERATOR_STATE, run, region)  # which lives as long as what recompute needs
            meter.take_inputs(region, tree_leaves((args, kwargs)))
            outputs = torch_checkpoint(run, *args, use_reentrant=False, **kwargs)
        else:
            outputs = run(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
            meter.leave_out(region)  # frozen, and so is all before it: what it would keep is freed at once
        return outputs

    attach(call)
    for parameter in model.parameters():
        parameter.grad = None
    run = functools.partial(model, **inputs) if isinstance(inputs, Mapping) else functools.partial(model, *inputs)
    with _named_linear(meter, blocks), meter:
        outputs = [t for t in tree_leaves(run()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            raise FastacError(
                "plan: no output of the model requires grad: nothing of it is trained, or gradients are off"
            )
        if not calls:
            raise FastacError(
                "plan: the model checkpoints by itself, or calls none of its blocks. Name them: blocks=..."
            )
        meter.end_forward()
        losses = [output.float().square().mean() for output in outputs]
        torch.stack(losses).sum().backward()
        del outputs, losses
        return meter.finish(model.parameters())


def _run(meter: Meter, region: str, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, meter.region = meter.region, region
    meter.begin(region)
    try:
        return block(*args, **kwargs)
    finally:
        meter.region = before


@contextlib.contextmanager
def _named_linear(meter: Meter, blocks: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Tells which Linear module of a block runs."""

    def begin(name: str, module: torch.nn.Module, args: Any) -> None:
        meter.linear = name

    def end(module: torch.nn.Module, args: Any, output: Any) -> None:
        meter.linear = ""

    handles = []
    for block in blocks.values():
        for name, module in block.named_modules():
            if type(module).forward is torch.nn.Linear.forward:  # others cannot be saved: `linear.attach`
                handles.append(module.register_forward_pre_hook(functools.partial(begin, name)))
                handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
