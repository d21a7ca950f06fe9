"""One training step of a model without weights: every allocation, and every operation that has FLOPs, in their order.

The model and its inputs are fake tensors, which have shapes and no memory. Each storage that an operation returns is an
event, and its end is another. Of every block it is known which outputs could be saved, when they go in the forward, and
when recompute makes them again: from one simulation of full checkpointing `fastac.planning.timeline` reads the bytes
that any policy holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.engine import flops, torch_private
from fastac.engine.blocks import block_of, describe
from fastac.engine.generators import generators_preserved
from fastac.engine.interception import LINEAR_OPS
from fastac.engine.releases import WHOLE_PRODUCT
from fastac.engine.tape import is_differentiable
from fastac.engine.torch_private import tree_leaves
from fastac.errors import FastacError
from fastac.planning.cuda import OneKernel
from fastac.planning.fake_model import FakeModel
from fastac.planning.timeline import EXCHANGED, Candidate, Event, Kept, Moment, Place, Timeline
from fastac.registry import classify
from fastac.registry.torch_private import arguments_of


@dataclasses.dataclass(frozen=True)
class Split:
    """One rank of Ulysses context parallelism, whose part of the tokens is simulated.

    Attention over the `tokens` of the video that the rank has, or more, is over those of all `ranks`, with its part of
    the heads: as many bytes, more FLOPs. Query, key, value and output go through an all-to-all each.
    """

    ranks: int = 1
    tokens: int = 0

    def keys(self, keys: int) -> int:
        """The number of keys of all ranks, for an attention that is simulated over the rank's own."""
        return keys + (self.ranks - 1) * self.tokens if self.applies_to(keys) else keys

    def applies_to(self, keys: int) -> bool:
        """Whether an attention over so many keys is over the video, and not the text alone."""
        return self.ranks > 1 and keys >= self.tokens


LINEAR_PRODUCTS = tuple(f"{name.replace('::', '.')}.default" for name in LINEAR_OPS)

GENERATOR_STATE = torch.get_rng_state().nbytes
"""Bytes that torch's checkpoint keeps of the CPU's random number generator for every block."""


@dataclasses.dataclass(eq=False)
class _Storage:
    event: Event  # its allocation
    candidate: Place | None = None  # that it is a part of
    copied: bool = False  # a copy would be saved, since nobody guards the original
    gone: bool = False
    region: str = ""  # that ends with it
    kept: Kept | None = None  # it is an input of regions


class Meter(TorchDispatchMode):
    """Records every allocation and every operation that has FLOPs while it is on."""

    def __init__(self, outside: Iterable[torch.Tensor], fake_model: FakeModel, split: Split) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.split = fake_model.known, split
        self.events: list[Event] = []
        self.flops: Counter[str] = Counter()  # by phase
        self.candidates: dict[str, list[Candidate]] = {name: [] for name in fake_model.blocks}  # by region
        self.forwards, self.forward_ends = True, 0  # whether the forward runs; the number of its events
        self.begins: defaultdict[str, list[Moment]] = defaultdict(
            list
        )  # by region: of its forward, and of its recompute
        self.kept: list[Kept] = []
        self.region = ""  # that runs, in forward or recompute
        self.linear = ""  # the Linear module that runs
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._alive: dict[int, _Storage] = {}  # by address
        self._parts: defaultdict[Place, list[_Storage]] = defaultdict(list)  # of the candidates
        self._held: defaultdict[str, Counter[Place]] = defaultdict(Counter)  # if saved, above full checkpointing
        self._repeated: Counter[str] = Counter()  # candidates of a region that recompute has come to

    def hold(self, size: int, owner: object, region: str) -> None:
        """Record bytes that no operation returns. They, and what a region saves, are released with their owner."""
        self._allocate(_Storage(Event(size), region=region), -id(owner), owner)  # addresses of storages are above 0

    def begin(self, region: str) -> None:
        """A region begins its forward, or its recompute."""
        self.linear = ""  # the recompute before may have ended inside a Linear module
        self.candidates.setdefault(region, [])
        self.begins[region].append(Moment(len(self.events), self.flops.total()))
        self.events.append(Event(0))

    def take_inputs(self, region: str, inputs: Iterable[Any]) -> None:
        """A region keeps its inputs; those that were there before the step are not recorded."""
        for storage in dict.fromkeys(filter(None, map(self._storage_of, inputs))):
            if storage.kept is None:
                storage.kept = Kept(storage.event.bytes)
                self.kept.append(storage.kept)
            storage.kept.inputs_of.append(region)

    def end_forward(self) -> None:
        """The forward has ended."""
        self.events.append(Event(0))
        self.forwards, self.forward_ends = False, len(self.events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # every question for the device of a fake tensor
            return func(*args)
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

    def _candidate(self, place: Place) -> Candidate:
        return self.candidates[place[0]][place[1]]

    def _storage_of(self, value: Any) -> _Storage | None:
        """The storage of a tensor, if it was allocated in the step."""
        if isinstance(value, torch.Tensor) and torch_private.has_storage(value):
            return self._alive.get(value.untyped_storage()._cdata)
        return None

    def _place(self, func: Any, keys: int, count: int) -> Place | None:
        """The candidate that was called: a new one, or the one that recompute has come to."""
        resolved = classify(func)
        attends = resolved is not None and resolved.is_attention
        if not attends and not (self.linear and str(func) in LINEAR_PRODUCTS):
            return None
        mine = self.candidates[self.region]
        if self.forwards:
            number = len(mine)
            mine.append(Candidate(str(func) if attends else self.linear, keys=self.split.keys(keys)))
            if attends and self.split.applies_to(keys):
                mine.append(Candidate(EXCHANGED))
            self.linear = self.linear if attends else ""
        else:
            number = self._repeated[self.region]
            number += mine[number].name == EXCHANGED
            self._repeated[self.region] = number + 1
            mine[number].flops = count
        return self.region, number

    def _leave_out_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A product that is changed in place cannot be replayed: no policy may name its Linear module."""
        arguments = arguments_of(func)
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        for argument in arguments:
            storage = self._storage_of(given.get(argument.name)) if argument.written else None
            if storage is not None and storage.candidate is not None and not storage.copied:
                candidate = self._candidate(storage.candidate)
                candidate.name = candidate.name if candidate.keys else ""

    def _see(self, storage: torch.UntypedStorage, place: Place | None, copied: bool) -> None:
        """Record a storage that an operation returns, if it is new. place: of the candidate that it is a part of."""
        address, size = storage._cdata, storage.nbytes()
        if address in self._outside or address in self._alive:
            return
        mine = _Storage(Event(size))
        if place is not None and self.forwards:
            mine.candidate, mine.copied = place, copied
            self._parts[place].append(mine)
            if copied:
                self._keep(mine.event, place, size)
                self.kept.append(Kept(size, candidate=place))
            if len(self._parts[place]) == 1:
                self._exchange(place, size)
        elif place is not None:
            self._replay(mine, place)
        self._allocate(mine, address, storage)

    def _allocate(self, storage: _Storage, address: int, owner: object) -> None:
        self._alive[address] = storage
        self.events.append(storage.event)
        weakref.finalize(owner, self._free, address).atexit = False

    def _keep(self, event: Event, place: Place, size: int) -> None:
        self._change(event, place, size)
        self._candidate(place).bytes += size

    def _change(self, event: Event, place: Place, change: int) -> None:
        event.candidate, event.change = place, change
        self._held[place[0]][place] += change

    def _replay(self, mine: _Storage, place: Place) -> None:
        """Recompute makes a part of a candidate, which it would not do if that were saved."""
        kept = self._parts[place].pop(0)
        if kept.gone and not kept.copied:  # a copy is replayed as another copy
            self._change(mine.event, place, -mine.event.bytes)

    def _exchange(self, place: Place, size: int) -> None:
        """The collectives of an attention return as much as itself, each: for query, key, value and output."""
        region, after = place[0], place[1] + 1
        mine = self.candidates[region]
        if after < len(mine) and mine[after].name == EXCHANGED:
            event = Event(0)
            self._keep(event, (region, after), 4 * size)
            self.kept += [Kept(size, candidate=(region, after)) for _ in range(4)]
            self.events.append(event)

    def _free(self, address: int) -> None:
        mine = self._alive.pop(address, None)
        if mine is None:
            return  # the step is over
        mine.gone = True
        self.events += [Event(0, saved, -held) for saved, held in self._held.pop(mine.region, {}).items()]
        event = Event(-mine.event.bytes, gradient=mine.event.gradient)
        place = mine.candidate
        if place is not None and not mine.copied and self._repeated[place[0]] <= place[1]:
            self._keep(event, place, mine.event.bytes)
            if mine.kept is not None:
                mine.kept.candidate = place
            elif self.forwards:  # else somebody else holds it, too
                self.kept.append(Kept(mine.event.bytes, candidate=place))
        elif mine.event.candidate is not None and mine.event.change < 0:  # recompute made it
            self._change(event, mine.event.candidate, mine.event.bytes)
        self.events.append(event)

    def finish(self, parameters: Iterable[torch.nn.Parameter]) -> Timeline:
        """The step. Storages that are alive stay so, and the gradients of parameters among them are marked."""
        for found in filter(None, (self._storage_of(parameter.grad) for parameter in parameters)):
            found.event.gradient = True
        self._alive.clear()
        return Timeline(self.events, self.forward_ends, self.flops, self.candidates, self.begins, self.kept)


@generators_preserved()
def simulate(fake_model: FakeModel, checkpointed: Collection[str], split: Split) -> Timeline:
    """One forward, and backward of the mean square of the outputs.

    A module that the model checkpoints beside its blocks, as UNets do, becomes a block of the fake_model.

    Args:
        checkpointed: blocks under full checkpointing. If there are some, so are those that are found now.
    """
    flops.register_formulas()
    names = {module: name for name, module in fake_model.model.named_modules()}
    names |= {block: name for name, block in fake_model.blocks.items()}
    known = set(fake_model.blocks)
    inputs = [leaf for leaf in tree_leaves((fake_model.args, fake_model.kwargs)) if isinstance(leaf, torch.Tensor)]
    meter = Meter([*fake_model.model.parameters(), *fake_model.model.buffers(), *inputs], fake_model, split)
    calls: Counter[str] = Counter()
    on_device = OneKernel if fake_model.as_on_cuda else contextlib.nullcontext
    precision: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if fake_model.as_on_cuda and torch.is_autocast_enabled("cuda"):
        precision = torch.autocast("cpu", torch.get_autocast_dtype("cuda"))  # of these tensors

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        module = block_of(block)
        if module is None or module not in names:
            raise FastacError(f"plan: the model checkpoints {describe(block)}, which is no module of it.")
        name = names[module]
        fake_model.blocks.setdefault(name, module)
        if torch_private.innermost_checkpoint() or not torch.is_grad_enabled():
            raise FastacError(f"plan: {name!r} runs in a checkpoint of the model's own. Switch that off.")
        calls[name] += 1
        region = name if calls[name] == 1 else f"{name}#{calls[name]}"

        def run(*args: Any, **kwargs: Any) -> Any:
            before, meter.region = meter.region, region
            meter.begin(region)
            try:
                with contextlib.nullcontext() if meter.forwards else on_device():  # backward has no function mode
                    return block(*args, **kwargs)
            finally:
                meter.region = before

        if name in checkpointed or (checkpointed and name not in known):
            meter.hold(GENERATOR_STATE, run, region)  # recompute needs both
            meter.take_inputs(region, tree_leaves((args, kwargs)))
            outputs = torch_checkpoint(run, *args, use_reentrant=False, **kwargs)
        else:
            outputs = run(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
            for one in meter.candidates[region]:  # frozen, as is all before it: nothing is kept for backward
                one.name, one.keys = "", 0
        return outputs

    fake_model.attach(call)
    for parameter in fake_model.model.parameters():
        parameter.grad = None
    with fake_model.known.mode, fake_model.known.readable(), _named_linear(meter, fake_model.blocks.values()), meter:
        with on_device(), precision:
            found = tree_leaves(fake_model.model(*fake_model.args, **fake_model.kwargs))
        outputs = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        del found
        if not outputs:
            raise FastacError(
                "plan: no output of the model requires grad. Train some of its weights, with grad enabled."
            )
        if not calls:
            raise FastacError(
                "plan: the model checkpoints by itself, or calls none of its blocks. Name them: blocks=..."
            )
        meter.end_forward()
        losses = [output.float().square().mean() for output in outputs]
        torch.stack(losses).sum().backward()
        del outputs, losses
        return meter.finish(fake_model.model.parameters())


@contextlib.contextmanager
def _named_linear(meter: Meter, blocks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Tell a meter which Linear module of a block runs."""

    def begin(name: str, module: torch.nn.Module, args: Any) -> None:
        meter.linear = name

    def end(module: torch.nn.Module, args: Any, output: Any) -> None:
        meter.linear = ""

    with contextlib.ExitStack() as stack:
        for name, module in (found for block in blocks for found in block.named_modules()):
            if type(module).forward is torch.nn.Linear.forward:  # others cannot be saved: `linear.attach`
                stack.enter_context(module.register_forward_pre_hook(functools.partial(begin, name)))
                stack.enter_context(module.register_forward_hook(end))
        yield
