"""The tape of one region: its forward stores outputs of attention here, and each recompute gets them back.

While a region runs, `fastac.engine.interception` sends every call of an op with a row to `Scope.call`, below autograd.
The scope is a `Tape` in the forward, and a `Replay` of that tape in each recompute. Every guard here follows a run with
wrong gradients, a false alarm or a leak: docs/hazards.md names its test.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from fastac.engine import releases, sparse, torch_private
from fastac.engine.beginning import Draws, States, devices_of, generator_state, set_states
from fastac.engine.measurement import MeasuredRegion
from fastac.engine.offload import Stash, StashedTensor
from fastac.engine.process import process, thread
from fastac.engine.results import Call, Communication, Product, RegionResult
from fastac.engine.torch_private import BELOW_BACKEND_SELECT
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.registry import BoundOp
from fastac.registry.torch_private import name_of

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack and unpack a saved tensor: torch.autograd.graph.saved_tensors_hooks."""

Caller = tuple[int, frozenset[int]]
"""Where an attention call was made: the newest autograd node at that time, and the ids of the code that was running."""


def run_kernel(
    op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inside: Scope | None = None
) -> Any:
    """Run the kernel itself, with the GIL released. Ops that the kernel calls are neither recorded nor replayed.

    inside: a scope that stays open while the kernel runs, because it ignores this op but not what the op calls.
    """
    scope = thread.scope
    thread.scope = inside
    try:
        return op.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)
    finally:
        thread.scope = scope


def is_differentiable(args: Sequence[Any]) -> bool:
    """Whether autograd differentiates a call with these arguments, and so notices in-place changes of its outputs."""
    if not torch.is_grad_enabled():
        return False
    for value in args:  # noqa: SIM110 a generator costs more than the rest
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def caller() -> Caller:
    """The caller of an attention call that is being made."""
    codes = set()
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        codes.add(id(frame.f_code))  # not the code itself: some code of torch.fx cannot be hashed
        frame = frame.f_back
    return torch_private.newest_node(), frozenset(codes)


class Packed:
    """A copy of an output that the user's saved-tensor hooks have packed. They may have moved it elsewhere."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        pack, self.unpack = hooks
        self.value = pack(torch_private.clone(tensor, tensor.stride()))
        self.stride, self.nbytes = tensor.stride(), tensor.nbytes

    def tensor(self, private: bool = True) -> torch.Tensor:
        """The output, in memory that nobody else uses."""
        return torch_private.clone(self.unpack(self.value), self.stride)


class Entry:
    """One call that a region made."""

    ran = False
    """The call returned. It may raise instead, and the block may then try another kernel."""
    stored: Sequence[Any] | None = None
    """The outputs of the call; None if recompute runs the call again."""
    single = False
    """The call returns one tensor, not a sequence."""
    guarded = False
    """Autograd notices in-place changes of the outputs."""
    versions: Sequence[int | None] = ()
    """Version of each output when it was stored: how often it had been changed in place."""
    generators: States = ()
    """Generators from which the kernel drew, in the states in which it left them."""
    selection: sparse.Selection | None = None
    """The blocks that sparse attention was given."""
    companion: Any = None
    """How the forward of an opaque kernel used its outputs (fastac.backends.opaque)."""

    def __init__(self, op: BoundOp, keys: int, inputs: Sequence[Any], product: str = "") -> None:
        self.op = op
        self.keys = keys
        # Metadata of the inputs, which recompute must repeat.
        self.inputs = inputs
        # Name in the block of the Linear module whose output this is, or "".
        self.product = product

    def __repr__(self) -> str:
        state = "recomputed" if self.stored is None else "stored"
        return f"Entry({self.op.name}{f' of {self.product}' * bool(self.product)}, {self.keys} keys, {state})"

    def store_outputs(self, outputs: Any, guarded: bool, copied: bool, hooks: Hooks | None = None) -> None:
        """Store the outputs of the call; copies of them if `copied`; copies that the user's hooks pack, if any."""
        self.single = isinstance(outputs, torch.Tensor)
        self.guarded = guarded and hooks is None
        sequence = (outputs,) if self.single else outputs
        if hooks is not None:
            self.store([Packed(value, hooks) if isinstance(value, torch.Tensor) else value for value in sequence])
        else:
            self.store(torch_private.clones(sequence) if copied else torch_private.aliases(sequence))

    def store_copy(self, position: int) -> None:
        """Store a copy of one output instead of the output itself."""
        stored = list(self.stored or ())
        stored[position : position + 1] = torch_private.clones(stored[position : position + 1])
        self.store(stored)

    def store(self, stored: Sequence[Any]) -> None:
        """Store values, as they are now."""
        self.stored, self.versions = stored, torch_private.versions(stored)

    def offload(self, stash: Stash) -> None:
        """Hand the outputs to the region's stash, which may move them to the host."""
        if self.stored is not None and self.op.kind != "choice" and not self.was_changed:
            self.store(
                [stash.take(value, value._version) if torch_private.is_plain(value) else value for value in self.stored]
            )

    @property
    def was_changed(self) -> bool:
        """Whether somebody changed an output in place since it was stored."""
        stored = self.stored or ()
        return torch_private.versions(stored) != self.versions or any(
            value.was_changed for value in stored if isinstance(value, StashedTensor)
        )

    def replayed(self) -> Any:
        """The outputs for one recompute, which cannot write into what a later backward gets."""
        assert self.stored is not None
        if self.was_changed:
            raise FastacError(
                f"the output of {self.op.name} was changed in place after it was saved, so recompute cannot use it. "
                f'Replace the in-place operation, or use policy="full" for this block.'
            )
        if self.op.kind == "choice":
            return sparse.unpacked(self.stored)
        # Autograd guards this memory, so it may be shared. A recompute that writes it would mean that the forward wrote
        # it too, and that was refused above.
        outputs = tuple([_replayed(value, not self.guarded) for value in self.stored])
        return outputs[0] if self.single else outputs

    @property
    def held(self) -> tuple[Any, ...]:
        """The stored outputs, and the tensors of the selection."""
        return (*(self.stored or ()), *(self.selection.tensors if self.selection is not None else ()))

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that the stored outputs hold."""
        return storage_bytes(self.held)

    @property
    def extra_bytes(self) -> int:
        """The part of `saved_bytes` that only the backward of an opaque kernel needs."""
        return 0 if self.companion is None else int(self.companion.extra_bytes(self.stored or ()))


def _replayed(value: Any, private: bool) -> Any:
    """A stored output, for recompute. private: in memory that nobody else uses."""
    if isinstance(value, (StashedTensor, Packed)):
        return value.tensor(private)
    if isinstance(value, torch.Tensor):
        return torch_private.clone(value, value.stride()) if private else value.detach()
    return value


def storage_bytes(values: Sequence[Any]) -> int:
    """Bytes that the tensors among some values hold, also on the host. Tensors that share memory count once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    elsewhere = sum(value.nbytes for value in values if isinstance(value, (StashedTensor, Packed)))
    return elsewhere + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def described(args: Sequence[Any]) -> list[Any]:
    """Metadata of a call's query, key and value, which recompute must repeat. It runs in every call, so it is cheap."""
    return [(a.shape, a.stride(), a.dtype) for a in args[:3] if isinstance(a, torch.Tensor)]


def inputs_of(args: Sequence[Any]) -> list[Any]:
    """Metadata of a collective, which recompute must repeat: of its tensors, and its splits, operation and group."""
    first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return [tensor for i in range(0, len(first), 3) for tensor in described(first[i : i + 3])] + list(args[1:])


def readable(op: BoundOp, inputs: Sequence[Any], product: str) -> str:
    """A call in words. inputs: its metadata, see above. product: the Linear module whose output it is, or ""."""
    parts = [
        f"{tuple(value[0])} {str(value[2]).removeprefix('torch.')} with strides {value[1]}"
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Size)
        else str(value)
        for value in inputs
    ]
    return f"{op.name}({', '.join(parts)})" + f" of the Linear module {product!r}" * bool(product)


class Scope:
    """Receives the calls of this thread while a region runs. Scopes nest as checkpointed regions do."""

    tape: Tape
    policy: Policy
    outer: Scope | None = None
    product: str | None = None
    """The Linear module that runs, if its output is saved. A hook of the module sets it; its matmul removes it."""

    def __enter__(self) -> Scope:
        self.outer = thread.scope
        thread.scope = self
        return self

    def __exit__(self, *exception: object) -> None:
        thread.scope, self.outer = self.outer, None

    def call(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Called for every op with a row that this thread calls while the scope is open. Returns the op's outputs."""
        product = ""
        if op.kind == "linear":
            if self.product is None:
                return op.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)
            product, self.product = self.product, None
        # Do not record (1) ops that were intercepted after this region began: the forward has no entry for them;
        # (2) calls that dynamo or AOT make while they trace: their tensors have no meaningful values.
        if op.number > self.tape.ops_at_start or torch_private.is_abstract(args):
            return run_kernel(op, keyset, args, kwargs, inside=self)
        if op.kind == "choice" and not sparse.is_choice(args):
            return self.pass_on(op, keyset, args, kwargs)
        return self.handle(op, keyset, args, kwargs, product)

    def handle(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        """Record the call, or replay it. product: the Linear module whose matmul it is, or ""."""
        raise NotImplementedError

    def pass_on(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Pass the call on to the region around this one, which may have stored its output, or to the kernel."""
        outer = self.outer
        # A backward inside this region's forward opened a scope with the same tape. It is not a region around this one.
        while outer is not None and outer.tape is self.tape:
            outer = outer.outer
        if outer is None:
            return run_kernel(op, keyset, args, kwargs)
        return outer.call(op, keyset, args, kwargs)


@dataclasses.dataclass(eq=False, repr=False)
class Tape(Scope):
    """The forward of a region: runs each call, and stores what the policy saves as long as the autograd graph lives."""

    policy: Policy
    preserves_generators: bool = True
    """Whether recompute restores the random number generators. If it does not, replay must not either: later ops would
    draw the same numbers twice."""
    callers: list[Caller] | None = None
    """Collects the caller of each attention call, if the region is observed."""
    hooks: Hooks | None = None
    """The user's hooks that pack and unpack the outputs that are saved."""
    measured: MeasuredRegion | None = None
    """The region is measured: it stores no outputs, and notes what it could store."""

    def __post_init__(self) -> None:
        self.entries: list[Entry] = []
        self.ops_at_start = len(process.installed)
        # Whether the forward has ended. A gradient taken inside the forward recomputes calls that have no entry yet.
        self.complete = False
        # The newest autograd node when the forward began, and when it ended.
        self.first_node = self.last_node = 0
        # The hook of the region whose forward this is, or of the checkpoint around it.
        self.checkpoint: object = None
        self.in_outer_recompute = False
        # Attention calls, with their numbers of keys.
        self.attention_calls: list[tuple[BoundOp, int]] = []
        # Names of the Linear modules whose outputs were stored.
        self.products: list[str] = []
        # Numbers of keys of attention that the policy saves and that ran as small ops, with no output to store.
        self.decomposed: list[int] = []
        # The collectives of the region; None without any.
        self.communication: Communication | None = None
        # Sees whether the region draws random numbers: in steps that compare values, if generators are not restored.
        self.draws: Draws | None = None
        # Outputs of collectives that are not complete yet and that autograd does not guard: key of the storage ->
        # entry, and position in its outputs.
        self.incomplete: dict[object, list[tuple[Entry, int]]] = {}

    def __repr__(self) -> str:
        stored = sum(entry.stored is not None for entry in self.entries)
        return f"Tape({self.policy}, {len(self.entries)} calls, {stored} stored)"

    @property
    def tape(self) -> Tape:  # type: ignore[override]
        """Itself. A `Replay` has the tape of the forward here."""
        return self

    def __enter__(self) -> Tape:
        super().__enter__()
        self.in_outer_recompute = self.outer is None and torch_private.in_backward()
        self.checkpoint = torch_private.innermost_checkpoint()
        self.first_node = torch_private.newest_node()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.complete = True
        self.draws = None
        self.checkpoint = None  # it refers to the region, which refers to this tape
        self.last_node = torch_private.newest_node()
        # If the wait for an output comes after the region, only its version counter protects the output.
        self.incomplete.clear()

    def handle(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        if op.kind in ("wait", "gather", "exchange"):
            return self._communicate(op, keyset, args, kwargs)
        if op.is_attention:
            op.check_trains()
            if self.callers is not None:
                self.callers.append(caller())
        keys = op.keys(args, kwargs)
        if op.kind == "decomposition":
            if self.policy.saves(keys):
                self.decomposed.append(keys)
            return self.pass_on(op, keyset, args, kwargs)
        saves = self.policy.saves(keys) if op.is_attention else True
        if saves and op.is_attention and not op.differentiates and is_differentiable(args):
            op.check_differentiates()
        # The entry is made before the call runs: if the call raises and the block then tries another kernel, recompute
        # does the same.
        entry = Entry(op, keys, described(args), product)
        self.entries.append(entry)
        before = self._prepare(entry, args, kwargs) if saves and op.kind != "choice" else {}
        if saves and self.draws is not None:
            self.draws.look()
        measured = self.measured
        began = measured.measurement.now() if measured is not None and measured.measurement.times_kernels else None
        outputs = self.pass_on(op, keyset, args, kwargs)
        if saves and self.draws is not None:
            self.draws.skip()
        entry.ran = True
        if op.is_attention:
            self.attention_calls.append((op, keys))
        if not saves:
            return outputs
        if op.kind == "choice":
            entry.store(sparse.packed(outputs, args[0].shape[op.argument("dim", args, kwargs)]))
            return outputs
        if before:
            after = [(device, generator_state(device)) for device in before]
            entry.generators = [(device, state) for device, state in after if not torch.equal(state, before[device])]
        # autograd notices in-place changes of the output of a differentiable call. It does not watch outputs inside an
        # autograd.Function (compiled code and custom ops reuse buffers), or if no input requires grad (the user may
        # then write into the output). In both cases store a copy.
        guarded = is_differentiable(args) and (not product or op.name == releases.WHOLE_PRODUCT)
        if product:
            self.products.append(product)
        if measured is not None:
            measured.note(op, product, (args, kwargs), outputs, number=len(self.entries), guarded=guarded, began=began)
            return outputs
        entry.store_outputs(outputs, guarded, not guarded, self.hooks)
        if op.is_opaque:
            entry.companion = process.opaque_calls[args[-1]].companion
            entry.companion.check()
        return outputs

    def _prepare(
        self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[torch.device, torch.Tensor]:
        """Check a call whose outputs will be saved. Returns the states of the generators from which it may draw."""
        op = entry.op
        what = f"the Linear module {entry.product!r}" if entry.product else op.name
        # The block's own checkpoint is open. (In a nested region of fastac, the scope of that region would be open.)
        own = thread.scope is self and torch_private.innermost_checkpoint() not in (None, self.checkpoint)
        if own or self.in_outer_recompute:
            which = "a checkpoint of the block's own" if own else "a checkpoint around the block"
            raise PolicyNotAppliedError(
                f"{self.policy}: {what} is called in {which} that saves nothing, and runs again in backward (torch's, "
                f'or fastac\'s with policy="full"). Leave that checkpoint out, or give it this policy.'
            )
        if op.written:
            op.check_call(args, kwargs)
        if op.selects:
            entry.selection = sparse.Selection(op.selection(args, kwargs))
        if self.preserves_generators and op.may_draw and op.draws(args, kwargs):
            return {device: generator_state(device) for device in devices_of(args)}
        return {}

    def _communicate(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Store the outputs of a collective that returns no more than its input, unless the policy recomputes it.

        A functional collective returns before it is complete, and a wait for the same memory completes it. Inside an
        autograd.Function or compiled code autograd does not guard the output, which may be overwritten after the wait.
        So the tape copies it at the wait.
        """
        if op.kind == "wait":
            outputs = self.pass_on(op, keyset, args, kwargs)
            for entry, position in self.incomplete.pop(torch_private.memory(args[0]), ()) if self.incomplete else ():
                entry.store_copy(position)
            return outputs
        entry = Entry(op, 0, inputs_of(args))
        if op.kind == "exchange":
            self.entries.append(entry)
        outputs = self.pass_on(op, keyset, args, kwargs)
        entry.ran = True
        self.communication = self.communication or Communication()
        self.communication.count("issued", outputs)
        if op.kind == "exchange" and self.measured is not None:
            self.measured.note(op, "", (args, kwargs), outputs, number=len(self.entries))
        elif op.kind == "exchange" and self.policy.saves_collectives:
            guarded = is_differentiable(args)
            entry.store_outputs(outputs, guarded, copied=False)
            self.communication.count("saved", entry.stored)
            for position, tensor in enumerate(() if guarded else entry.stored or ()):
                self.incomplete.setdefault(torch_private.memory(tensor), []).append((entry, position))
        return outputs

    def made_the_calls_of(self, result: RegionResult) -> bool:
        """Whether the region made the same calls as another one, with the same numbers of keys."""
        return self.attention_calls == list(result.attention_calls) and self.products == [
            product.name for product in result.products
        ]

    def result(self, compiled: bool = False, writing: int = 0, unknown: tuple[str, ...] = ()) -> RegionResult:
        """The calls of the region in numbers, without tensors. The arguments are fields of the result."""
        attention = [entry for entry in self.entries if entry.op.is_attention and entry.ran]
        return RegionResult(
            attention_calls=tuple(self.attention_calls),
            calls=tuple(
                Call(entry.op.name, int(entry.keys), entry.stored is not None, entry.saved_bytes, entry.extra_bytes)
                for entry in attention
            ),
            products=tuple(
                Product(e.product, e.saved_bytes) for e in self.entries if e.product and e.stored is not None
            ),
            choice_bytes=sum(entry.saved_bytes for entry in self.entries if entry.op.kind == "choice"),
            compiled=compiled,
            writing=writing,
            unknown=unknown,
        )


class Replay(Scope):
    """One recompute of a region: returns what the tape has stored, in the order of the calls, and runs the rest."""

    position = 0

    def __init__(self, tape: Tape, explain: Callable[[], str]) -> None:
        """explain: returns what may explain that recompute took another path, as a line with its break, or ""."""
        self.tape = tape
        self.policy = tape.policy
        self.explain = explain

    def __enter__(self) -> Replay:
        running = torch_private.running_backward()
        if running != thread.backward:
            thread.backward, thread.replayed = running, []
        thread.replayed.append((self.tape.first_node, self.tape.last_node, self.policy))
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        # An early stop is an exception. A recompute that reached its end must have made all calls of the forward.
        if exception[0] is None and self.position != len(self.tape.entries):
            missing = self.tape.entries[self.position]
            raise self._another_path(f"ended before {readable(missing.op, missing.inputs, missing.product)}", "made it")

    def handle(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        is_issued = op.kind in ("exchange", "gather")
        entry = None
        if op.kind not in ("decomposition", "wait", "gather"):
            entry = self._next(op, inputs_of(args) if is_issued else described(args), product)
        if entry is None or entry.stored is None:
            outputs = self.pass_on(op, keyset, args, kwargs)
            if self.tape.measured is not None and entry is not None:
                self.tape.measured.ran_again(self.position, outputs)
            if is_issued and self.tape.communication is not None:
                self.tape.communication.count("again", outputs)
            return outputs
        set_states(entry.generators)  # so that the next op draws the numbers that it drew in the forward
        for counter in process.replayed_calls if op.is_attention else ():
            counter[name_of(op.op)] += 1
        if entry.selection is not None:
            entry.selection.put_into(op, op.selection(args, kwargs))
        if op.is_opaque:
            process.opaque_calls[args[-1]].companion = entry.companion
        return entry.replayed()

    def _next(self, op: BoundOp, inputs: Sequence[Any], product: str) -> Entry:
        """The entry of the call that recompute makes now. Raises RecomputeError if the forward made another call."""
        if self.position >= len(self.tape.entries):
            if not self.tape.complete:
                return Entry(op, 0, inputs)
            raise self._another_path(f"called {readable(op, inputs, product)}", "had ended")
        entry = self.tape.entries[self.position]
        # Ops are compared by name: torch may return another object for the same op once the garbage collector has freed
        # an older definition of it.
        if (
            entry.inputs != inputs
            or entry.product != product
            or (entry.op is not op and entry.op.qualified_name != op.qualified_name)
        ):
            forward = readable(entry.op, entry.inputs, entry.product)
            raise self._another_path(f"called {readable(op, inputs, product)}", f"called {forward}")
        self.position += 1
        return entry

    def _another_path(self, recompute: str, forward: str) -> RecomputeError:
        return RecomputeError(
            f"recompute {recompute} where the forward {forward}.\n{self.explain()}The checkpointed function "
            f"took another path, or chose otherwise (random numbers do that), or the attention backend changed in "
            f"between, or a cache (use_cache=True) was filled. Make it depend only on its arguments."
        )


class RecomputeError(FastacError, CheckpointError):
    """A recompute that differs from the forward. Code that expects torch's CheckpointError catches it."""

    def __reduce__(self) -> Any:
        # `fastac.engine.region` raises subclasses that are made on the spot, and cannot be pickled.
        return RecomputeError, self.args, self.__dict__
