"""One training step of a model without weights: every allocation, and every operation that has FLOPs, in their order.

The model and its inputs are fake tensors, which have shapes and no memory. Each storage that an operation returns is an
event, and its end is another. For every block we record which outputs could be saved, when the forward frees them, and
when recompute makes them again. One simulation of full checkpointing is therefore enough: `fastac.planning.timeline`
computes from it the bytes under any policy.
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

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import linear, torch_private
from fastac.engine.beginning import generators_preserved
from fastac.engine.blocks import block_of, describe
from fastac.engine.interception import LINEAR_OPS
from fastac.engine.releases import WHOLE_PRODUCT
from fastac.engine.tape import is_differentiable
from fastac.engine.torch_private import tree_leaves
from fastac.errors import FastacError
from fastac.planning.fake_model import FakeModel
from fastac.planning.fused_kernels import OneKernel
from fastac.planning.repetition import Cut, NotAlikeError, Series, repeated, series_of
from fastac.planning.timeline import EXCHANGED, Candidate, Event, HeldStorage, Moment, Place, Timeline
from fastac.registry import classify, flops
from fastac.registry.torch_private import arguments_of


@dataclasses.dataclass(frozen=True)
class Split:
    """One rank of Ulysses context parallelism, whose part of the tokens is simulated.

    An attention call over at least the `tokens` of the rank's part of the video is taken to run over the tokens of all
    `ranks`, with the rank's part of the heads: as many bytes, more FLOPs. Query, key, value and output go through an
    all-to-all each.
    """

    ranks: int = 1
    tokens: int = 0

    def keys(self, keys: int) -> int:
        """The number of keys of all ranks, for an attention call that is simulated over the rank's own keys."""
        return keys + (self.ranks - 1) * self.tokens if self.applies_to(keys) else keys

    def applies_to(self, keys: int) -> bool:
        """Whether an attention call over so many keys is over the video, and not only over the text."""
        return self.ranks > 1 and keys >= self.tokens


LINEAR_PRODUCTS = tuple(f"{name.replace('::', '.')}.default" for name in LINEAR_OPS)

GENERATOR_STATE = torch.get_rng_state().nbytes
"""Bytes of the state of the CPU's random number generator, which torch's checkpoint holds for every block."""


@dataclasses.dataclass(eq=False)
class _Storage:
    """A storage that the step allocated."""

    event: Event  # its allocation
    # The candidate that this storage is a part of.
    candidate: Place | None = None
    # Saving it would save a copy: autograd does not guard the original, so somebody may write into it.
    copied: bool = False
    gone: bool = False
    # The region whose saved outputs are released together with this storage.
    region: str = ""
    # Its entry among the storages that regions hold, once it is an input of a region.
    held: HeldStorage | None = None


class Meter(TorchDispatchMode):
    """Records every allocation and every operation that has FLOPs while it is on."""

    def __init__(self, outside: Iterable[torch.Tensor], fake_model: FakeModel, split: Split) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.split = fake_model.known, split
        # What a Timeline is made of: see there.
        self.events: list[Event] = []
        self.flops: Counter[str] = Counter()
        self.candidates: dict[str, list[Candidate]] = {name: [] for name in fake_model.blocks}
        self.begins: defaultdict[str, list[Moment]] = defaultdict(list)
        self.storages: list[HeldStorage] = []
        self.forwards, self.forward_ends = True, 0  # whether the forward runs; the number of its events
        # The region and the Linear module that run now, in forward or recompute.
        self.region = self.linear = ""
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._alive: dict[int, _Storage] = {}  # address -> storage
        # Candidate -> its storages that recompute has not made again.
        self._parts: defaultdict[Place, list[_Storage]] = defaultdict(list)
        # Region -> the bytes that each candidate, if it is saved, adds to what full checkpointing holds just now.
        self._added: defaultdict[str, Counter[Place]] = defaultdict(Counter)
        # Region -> how many of its candidates recompute has come to.
        self._repeated: Counter[str] = Counter()

    def add_owned(self, size: int, owner: object, region: str) -> None:
        """Record bytes that no operation returns. They, and what a region saves, are released with their owner."""
        self._allocate(_Storage(Event(size), region=region), -id(owner), owner)  # addresses of storages are above 0

    def begin(self, region: str) -> None:
        """A region begins its forward, or its recompute."""
        self.linear = ""  # the recompute before may have ended inside a Linear module
        self.candidates.setdefault(region, [])
        self.begins[region].append(Moment(len(self.events), self.flops.total()))
        self.events.append(Event(0))

    def take_inputs(self, region: str, inputs: Iterable[Any]) -> None:
        """A region holds its inputs. Those that were there before the step are not recorded."""
        for storage in dict.fromkeys(filter(None, map(self._storage_of, inputs))):
            if storage.held is None:
                storage.held = HeldStorage(storage.event.bytes)
                self.storages.append(storage.held)
            storage.held.inputs_of.append(region)

    def cut(self) -> Cut:
        """What is recorded up to now."""
        return Cut(len(self.events), len(self.storages), self.flops.copy())

    def end_forward(self) -> None:
        """The forward has ended."""
        self.events.append(Event(0))
        self.forwards, self.forward_ends = False, len(self.events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `tensor.device` of a fake tensor comes here as an operation: the most frequent one, and it allocates nothing.
        if func is torch.ops.prim.device.default:
            return func(*args)
        outputs = self.known.run(func, args, kwargs)
        if self.forwards and getattr(getattr(func, "_schema", None), "is_mutable", False):
            self._leave_out_written(func, args, kwargs)
        phase = "forward" if self.forwards else "recompute" if torch_private.in_recompute() else "backward"
        count, keys = flops.of_call(func, args, kwargs, outputs), flops.keys_of_call(func, args, kwargs)
        if count:
            count = count * self.split.keys(keys) // keys if keys else count
            self.flops[phase] += count
        # The engine saves an output itself if autograd notices a write into it, and else a copy. It notices none into a
        # matmul to which the Linear module adds its bias afterwards.
        guarded = is_differentiable(args) and (self.linear == "" or str(func) == WHOLE_PRODUCT)
        place = self._place(func, keys, count) if self.region and phase != "backward" else None
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and torch_private.has_storage(tensor):
                self._see(tensor.untyped_storage(), place, copied=not guarded)
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
        exchanges = resolved is not None and resolved.kind == "exchange"
        if not attends and not exchanges and not (self.linear and str(func) in LINEAR_PRODUCTS):
            return None
        candidates = self.candidates[self.region]
        if self.forwards:
            index = len(candidates)
            name = str(func) if attends else EXCHANGED if exchanges else self.linear
            candidates.append(Candidate(name, keys=self.split.keys(keys)))
            # Only the first product of a call is the output of the Linear module.
            self.linear = self.linear if attends or exchanges else ""
        else:
            # Recompute makes the calls of the forward in the same order. Collectives of a split are not simulated.
            index = self._repeated[self.region]
            index += self.split.ranks > 1 and candidates[index].name == EXCHANGED
            self._repeated[self.region] = index + 1
            candidates[index].flops = count
        return self.region, index

    def _leave_out_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A product that is changed in place cannot be replayed: no policy may name its Linear module."""
        arguments = arguments_of(func)
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        for argument in arguments:
            storage = self._storage_of(values.get(argument.name)) if argument.written else None
            if storage is not None and storage.candidate is not None and not storage.copied:
                candidate = self._candidate(storage.candidate)
                candidate.name = candidate.name if candidate.keys else ""

    def _see(self, storage: torch.UntypedStorage, place: Place | None, copied: bool) -> None:
        """Record a storage that an operation returns, if it is new. place: the candidate that it is a part of."""
        address, size = storage._cdata, storage.nbytes()
        if address in self._outside or address in self._alive:
            return
        allocated = _Storage(Event(size))
        if place is not None and self.forwards:
            allocated.candidate, allocated.copied = place, copied
            self._parts[place].append(allocated)
            if copied:  # the copy is allocated at this moment, beside the original
                self._save(allocated.event, place, size)
                self.storages.append(HeldStorage(size, candidate=place))
            is_output = len(self._parts[place]) == 1  # the others are softmax statistics
            if is_output and self.split.applies_to(self._candidate(place).keys):
                self._exchange(place[0], size)
        elif place is not None:
            # Recompute makes a part of a candidate. It would not do that if the candidate were saved. If the original
            # still lives, nothing was added for it. If a copy is saved, its replay is another copy.
            original = self._parts[place].pop(0)
            if original.gone and not original.copied:
                self._change(allocated.event, place, -size)
        self._allocate(allocated, address, storage)

    def _allocate(self, storage: _Storage, address: int, owner: object) -> None:
        self._alive[address] = storage
        self.events.append(storage.event)
        weakref.finalize(owner, self._free, address).atexit = False

    def _save(self, event: Event, place: Place, size: int) -> None:
        """From this event on a saved candidate holds more bytes than full checkpointing does."""
        self._change(event, place, size)
        self._candidate(place).bytes += size

    def _change(self, event: Event, place: Place, change: int) -> None:
        event.candidate, event.change = place, change
        self._added[place[0]][place] += change

    def _exchange(self, region: str, size: int) -> None:
        """The collectives for query, key, value and output return as many bytes as the attention, each."""
        event, place = Event(0), (region, len(self.candidates[region]))
        self.candidates[region].append(Candidate(EXCHANGED))
        self._save(event, place, 4 * size)
        self.storages += [HeldStorage(size, candidate=place) for _ in range(4)]
        self.events.append(event)

    def _free(self, address: int) -> None:
        """Record that a storage was released."""
        storage = self._alive.pop(address, None)
        if storage is None:
            return  # the step is over
        storage.gone = True
        self.events += [Event(0, saved, -size) for saved, size in self._added.pop(storage.region, {}).items()]
        event = Event(-storage.event.bytes, ends=storage.event)
        place = storage.candidate
        # The forward releases an output that recompute has yet to make: a policy that saves it would hold it on.
        if place is not None and not storage.copied and self._repeated[place[0]] <= place[1]:
            self._save(event, place, storage.event.bytes)
            if storage.held is not None:
                storage.held.candidate = place
            elif self.forwards:  # if it is released later, something besides the region holds it, too
                self.storages.append(HeldStorage(storage.event.bytes, candidate=place))
        elif storage.event.candidate is not None and storage.event.change < 0:  # recompute made it
            self._change(event, storage.event.candidate, storage.event.bytes)
        self.events.append(event)

    def finish(self, parameters: Iterable[torch.nn.Parameter]) -> Timeline:
        """The step. Storages that are alive stay so, and the gradients of parameters among them are marked."""
        for gradient in filter(None, (self._storage_of(parameter.grad) for parameter in parameters)):
            gradient.event.gradient = True
        self._alive.clear()  # the finalizers of these storages find nothing, and record nothing
        return Timeline(self.events, self.forward_ends, self.flops, self.candidates, self.begins, self.storages)


@generators_preserved()
def simulate(fake_model: FakeModel, checkpointed: Collection[str], split: Split) -> Timeline:
    """One forward, and backward of the mean square of the outputs.

    A module that the model checkpoints beside its blocks, as UNets do, becomes a block of the fake model.

    Args:
        checkpointed: blocks under full checkpointing. If there are any, blocks that are found now are checkpointed too.
    """
    blocks = dict(fake_model.blocks)
    try:
        return _simulate(fake_model, checkpointed, split, series_of(fake_model.model, blocks, checkpointed))
    except NotAlikeError:
        fake_model.blocks.clear()
        fake_model.blocks.update(blocks)
        return _simulate(fake_model, checkpointed, split, {})


def _simulate(
    fake_model: FakeModel, checkpointed: Collection[str], split: Split, all_series: Mapping[str, Series]
) -> Timeline:
    """Simulate a step. all_series: names of blocks of which not all have to run -> their series."""
    flops.register_formulas()
    torch.clear_autocast_cache()  # of weights that an earlier simulation has cast
    names = {module: name for name, module in (*fake_model.model.named_modules(), *fake_model.blocks.items())}
    blocks_before = set(fake_model.blocks)
    inputs = tensors_of((fake_model.args, fake_model.kwargs))
    meter = Meter([*fake_model.model.parameters(), *fake_model.model.buffers(), *inputs], fake_model, split)
    calls: Counter[str] = Counter()
    on_device = OneKernel if fake_model.as_on_cuda else contextlib.nullcontext
    # The fake tensors are on the CPU, where the caller's autocast would change nothing.
    casts = fake_model.as_on_cuda and torch.is_autocast_enabled("cuda")
    precision: Any = torch.autocast("cpu", torch.get_autocast_dtype("cuda")) if casts else contextlib.nullcontext()

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        module = block_of(block)
        if module is None or module not in names:
            raise FastacError(f"plan: the model checkpoints {describe(block)}, which is not one of its modules.")
        name = names[module]
        fake_model.blocks.setdefault(name, module)
        if torch_private.innermost_checkpoint() or not torch.is_grad_enabled():
            raise FastacError(f"plan: {name!r} runs in a checkpoint of the model's own. Switch that off.")
        calls[name] += 1
        region = name if calls[name] == 1 else f"{name}#{calls[name]}"
        series = None if meter.region else all_series.get(name)
        if series is not None and (outputs := series.enter(name, module, (args, kwargs), meter.cut())) is not None:
            meter.begins[region] = []  # in the order of the calls
            return outputs

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, meter.region = meter.region, region
            meter.begin(region)
            try:
                # A function mode is not active inside backward(), so recompute would run without it. torch's checkpoint
                # restores only torch.device (up to 2.15). pytorch pytorch#148023 would make this unnecessary.
                with contextlib.nullcontext() if meter.forwards else on_device():
                    return block(*args, **kwargs)
            finally:
                meter.region = outer

        if name in checkpointed or (checkpointed and name not in blocks_before):
            # torch's checkpoint holds both until the block's backward is done: `run` dies with it.
            meter.add_owned(GENERATOR_STATE, run, region)
            meter.take_inputs(region, tree_leaves((args, kwargs)))
            outputs = torch_checkpoint(run, *args, use_reentrant=False, **kwargs)
        else:
            outputs = run(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_of(outputs)):
            # The block is frozen, as is everything before it: backward needs nothing from it, so nothing is saved.
            for candidate in meter.candidates[region]:
                candidate.name, candidate.keys = "", 0
        if series is not None:
            series.leave(name, outputs, meter.cut)
        return outputs

    fake_model.attach(call)
    for tensor in (*fake_model.model.parameters(), *inputs):
        tensor.grad = None
    with fake_model.known.mode, fake_model.known.readable(), _named_linear(meter, fake_model.blocks.values()), meter:
        with on_device(), precision:
            leaves = tensors_of(fake_model.model(*fake_model.args, **fake_model.kwargs))
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        del leaves  # a training step holds none of the other outputs
        if not outputs:
            raise FastacError("plan: no output of the model requires grad. Train some weights, with grad enabled.")
        if not calls:
            raise FastacError("plan: the model checkpoints by itself, or calls no block. Name them: blocks=...")
        meter.end_forward()
        losses = [output.float().square().mean() for output in outputs]
        torch.stack(losses).sum().backward()
        del outputs, losses
        return repeated(meter.finish(fake_model.model.parameters()), set(all_series.values()))


@contextlib.contextmanager
def _named_linear(meter: Meter, blocks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Tell a meter which Linear module of a block runs."""

    def runs(name: str, *of_hook: Any) -> None:
        meter.linear = name

    with contextlib.ExitStack() as stack:
        for name, module in (named for block in blocks for named in block.named_modules()):
            if linear.calls_one_product(module):  # others cannot be saved
                stack.enter_context(module.register_forward_pre_hook(functools.partial(runs, name)))
                stack.enter_context(module.register_forward_hook(functools.partial(runs, "")))
        yield
