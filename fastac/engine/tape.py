"""The tape of one region: what its forward keeps, and how its recompute gets it back.

Every op with a row that is called while a region runs in this thread arrives at `call` of the innermost open scope,
below autograd (see `fastac.engine.interception`): a `Tape` in the forward, a `Replay` of it in each recompute. Every
guard here was put in after a run with wrong gradients, a false alarm or a leak: docs/how-it-works.md has its test.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from fastac.engine import releases, sparse, torch_private
from fastac.engine.calls import Call, Product, RegionResult, described, inputs_of, readable
from fastac.engine.collectives import Communication
from fastac.engine.generators import devices_of, generator_state, set_states
from fastac.engine.offload import KeptTensor, Stash
from fastac.engine.torch_private import BELOW_BACKEND_SELECT
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.registry import BoundOp

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that is saved, and unpacks it: torch.autograd.graph.saved_tensors_hooks."""

Listener = Callable[[BoundOp, Sequence[Any], Mapping[str, Any]], None]


class _State(threading.local):
    """What is open in this thread: backward runs in other threads.

    backward: the last one in which regions were recomputed; replayed: which, by the first and last of their autograd
    nodes, with their policies.
    """

    scope: Scope | None = None
    backward: int | None = None
    replayed: list[tuple[int, int, Policy]]


class Engine:
    """Everything that the engine knows in this process, beside the scope that is open in each thread.

    answered: counts attention calls that got what was kept, and ran no kernel, while it stands here (fastac.verify).
    collectors: get the result of every region that ends as it should, while they stand here (fastac.verify).
    listeners: called with attention that runs where no region is open: in another thread, in a compiled backward.
    in_graphs: how many regions ran in a graph that dynamo made and AOT did not, where none of them is seen to open.
    installed: intercepted ops by qualified name, with what stands in the dispatcher for them.
    pending: fingerprints of recomputes on an accelerator that nobody has read so far (`fastac.engine.comparison`).
    modules: what was loaded when libraries were last looked for. opaque: calls of `fastac.engine.opaque` that are on
    their way through the dispatcher, by their handle, which is the last argument of the op.
    """

    def __init__(self) -> None:
        self.installed: dict[str, tuple[BoundOp, Any]] = {}
        self.lock = threading.RLock()
        self.modules: object = None
        self.opaque: dict[int, Any] = {}
        self.thread = _State()
        self.reset()

    def reset(self) -> None:
        """Close what a test left open. What stands in the dispatcher stays: taking it off crashes other threads."""
        self.answered: list[collections.Counter[str]] = []
        self.collectors: list[list[RegionResult]] = []
        self.listeners: list[Listener] = []
        self.in_graphs = 0
        self.pending: list[Any] = []
        self.thread.scope = None
        self.thread.backward = None


engine = Engine()
thread = engine.thread


def run_kernel(
    op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inside: Scope | None = None
) -> Any:
    """Run the kernel itself, with the GIL released. An op that it calls is part of it: not recorded nor replayed.

    inside: the scope that stays open while it runs, of an op that is none of its business.
    """
    scope = thread.scope
    thread.scope = inside
    try:
        return op.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)
    finally:
        thread.scope = scope


def is_differentiable(args: Sequence[Any]) -> bool:
    """Whether autograd differentiates through a call of these arguments, and so notices in-place changes of outputs."""
    if not torch.is_grad_enabled():
        return False
    for value in args:  # noqa: SIM110 a generator costs more than the rest
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


class Packed:
    """A copy of an output as the saved-tensor hooks around the region packed it, and may have moved it elsewhere."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        pack, self.unpack = hooks
        self.value = pack(torch_private.clone(tensor, tensor.stride()))
        self.stride, self.nbytes = tensor.stride(), tensor.nbytes

    def tensor(self, private: bool = True) -> torch.Tensor:
        """The output, in memory of its own."""
        return torch_private.clone(self.unpack(self.value), self.stride)


class Entry:
    """One call of a region, and what its replay is checked by."""

    ran = False
    kept: Sequence[Any] | None = None
    """The outputs of the call; None where it is recomputed."""
    single = False
    """The call returns one tensor, not a sequence."""
    guarded = False
    """Autograd notices an in-place change of the outputs."""
    versions: Sequence[int | None] = ()
    """How often each output was changed in place when it was kept."""
    generators: Sequence[tuple[torch.device, torch.Tensor]] = ()
    """The states that the kernel left behind, where it drew random numbers."""
    selection: sparse.Selection | None = None
    companion: Any = None
    """What the outputs of an opaque kernel mean."""

    def __init__(self, op: BoundOp, keys: int, inputs: Sequence[Any], product: str = "") -> None:
        self.op = op
        self.keys = keys
        self.inputs = inputs
        self.product = product  # the Linear module whose output it is, by its name in the block

    def keep(self, outputs: Any, guarded: bool, copied: bool, hooks: Hooks | None = None) -> None:
        """Keep what the call has returned, or a copy of it, or what the hooks made of a copy."""
        self.single = isinstance(outputs, torch.Tensor)
        self.guarded = guarded and hooks is None
        sequence = (outputs,) if self.single else outputs
        if hooks is not None:
            self._hold(tuple(Packed(one, hooks) if isinstance(one, torch.Tensor) else one for one in sequence))
        else:
            self._hold(torch_private.clones(sequence) if copied else torch_private.aliases(sequence))

    def copy(self, position: int) -> None:
        """Keep a copy of one output in the place of itself."""
        kept = list(self.kept or ())
        kept[position : position + 1] = torch_private.clones(kept[position : position + 1])
        self._hold(tuple(kept))

    def keep_choice(self, outputs: Sequence[torch.Tensor], among: int) -> None:
        """Keep what was chosen among so many."""
        self._hold(sparse.packed(outputs, among))

    def _hold(self, kept: Sequence[Any]) -> None:
        self.kept, self.versions = kept, torch_private.versions(kept)

    def offload(self, stash: Stash) -> None:
        """Let the stash of the region say where the outputs are."""
        if self.kept is not None and self.op.kind != "choice" and not self.was_changed:
            self._hold(
                tuple(stash.keep(one, one._version) if torch_private.is_plain(one) else one for one in self.kept)
            )

    @property
    def was_changed(self) -> bool:
        """Whether an output was changed in place since it was kept."""
        kept = self.kept or ()
        return torch_private.versions(kept) != self.versions or any(
            one.was_changed for one in kept if isinstance(one, KeptTensor)
        )

    def hand_out(self) -> Any:
        """What was kept, once more. Nobody may write what a second backward will ask for again."""
        assert self.kept is not None
        if self.was_changed:
            raise FastacError(
                f"the output of {self.op.name} was changed in place after it was saved, so recompute cannot use it. "
                f'Replace the in-place operation, or use policy="full" for this block.'
            )
        if self.op.kind == "choice":
            return sparse.unpacked(self.kept)
        # Sharing memory is safe where it is guarded: a forward that writes into it, as recompute would, was refused.
        outputs = tuple([_once_more(one, not self.guarded) for one in self.kept])
        return outputs[0] if self.single else outputs

    @property
    def held(self) -> tuple[Any, ...]:
        """The kept outputs, and the tensors of the selection."""
        return (*(self.kept or ()), *(self.selection.tensors if self.selection is not None else ()))

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that the kept outputs hold."""
        return held_bytes(self.held)

    @property
    def extra_bytes(self) -> int:
        """Of these, what only an opaque kernel's backward needs."""
        return 0 if self.companion is None else int(self.companion.extra_bytes(self.kept or ()))


def _once_more(value: Any, private: bool) -> Any:
    """An output that was kept. private: in memory of its own."""
    if isinstance(value, (KeptTensor, Packed)):
        return value.tensor(private)
    if isinstance(value, torch.Tensor):
        return torch_private.clone(value, value.stride()) if private else value.detach()
    return value


def held_bytes(values: Sequence[Any]) -> int:
    """Bytes that the tensors among some values hold, packed ones elsewhere; what shares memory counts once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    packed = sum(value.nbytes for value in values if isinstance(value, (KeptTensor, Packed)))
    return packed + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Scope:
    """What is open in this thread while a region runs. Scopes nest as checkpointed regions do."""

    tape: Tape
    policy: Policy
    outer: Scope | None = None
    product: str | None = None
    """The Linear module that runs and whose output is saved, until its product was called."""

    def __enter__(self) -> Scope:
        self.outer = thread.scope
        thread.scope = self
        return self

    def __exit__(self, *exception: object) -> None:
        thread.scope, self.outer = self.outer, None

    def call(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An op with a row was called in this thread while the scope is open."""
        product = ""
        if op.kind == "linear":
            if self.product is None:
                return op.redispatch(keyset & BELOW_BACKEND_SELECT, *args, **kwargs)
            product, self.product = self.product, None
        # dynamo and AOT call ops with fakes, or the real kernel on meaningless tensors, while a region is open.
        if op.number > self.tape.ops_at_start or torch_private.is_abstract(args):
            return run_kernel(op, keyset, args, kwargs, inside=self)
        if op.kind == "choice" and not sparse.is_choice(args):
            return self.run(op, keyset, args, kwargs)
        return self.meet(op, keyset, args, kwargs, product)

    def meet(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        """Such a call that concerns the region. product: the Linear module that it belongs to, or ""."""
        raise NotImplementedError

    def run(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Forward the call: to the region around this one, which may hold its output, or to the kernel."""
        outer = self.outer
        while outer is not None and outer.tape is self.tape:
            outer = outer.outer  # backward was called inside the region's own forward: that is no region around it
        if outer is None:
            return run_kernel(op, keyset, args, kwargs)
        return outer.call(op, keyset, args, kwargs)


class Tape(Scope):
    """The forward of a region: runs each call and keeps what the policy saves, as long as the autograd graph lives.

    Args:
        preserves_generators: the recompute puts generators back. Where it does not, nor does the tape: what follows
            the backward would draw the same numbers again.
        owners: collects, for each attention call, the autograd node that it belongs to.
        hooks: pack what is saved, and unpack it.
    """

    def __init__(
        self,
        policy: Policy,
        preserves_generators: bool = True,
        owners: list[int] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.policy = policy
        self.preserves_generators = preserves_generators
        self.owners = owners
        self.hooks = hooks
        self.entries: list[Entry] = []
        self.ops_at_start = len(engine.installed)  # ops with a row that came later have no entries: they are ignored
        self.complete = False  # a gradient taken in the middle of the forward recomputes what has no entry yet
        self.first_node = self.last_node = 0  # the newest autograd node when the forward began, and when it ended
        self.in_outer_recompute = False
        self.checkpoint: object = None
        self.made: list[tuple[BoundOp, int]] = []  # attention calls, with their numbers of keys
        self.products: list[str] = []  # Linear modules whose outputs were kept
        self.denied: list[BoundOp] = []  # what drew random numbers in a call in which, by its row, it draws none
        self.decomposed: list[int] = []  # numbers of keys of attention that ran as small ops, where it was to be saved
        self.communication: Communication | None = None  # of a region that has any

    @property
    def tape(self) -> Tape:  # type: ignore[override]
        """Itself, as a `Replay` has one."""
        return self

    def __enter__(self) -> Tape:
        super().__enter__()
        self.in_outer_recompute = self.outer is None and torch_private.in_backward()
        self.checkpoint = torch_private.innermost_checkpoint()  # the one that this is the forward of
        self.first_node = torch_private.newest_node()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.complete = True
        self.checkpoint = None  # it holds the region, which holds this
        self.last_node = torch_private.newest_node()
        if self.communication is not None:
            self.communication.pending.clear()  # what is waited for outside is guarded by its version alone

    def meet(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        if op.kind == "decomposition":
            keys = op.keys(args, kwargs)
            keys = keys if isinstance(keys, int) else sys.maxsize
            if self.policy.saves(keys):
                self.decomposed.append(keys)
            return self.run(op, keyset, args, kwargs)
        if op.kind in ("wait", "gather", "exchange"):
            return self._communicate(op, keyset, args, kwargs)
        if op.is_attention:
            if not op.trains:
                op.check_trains()
            if self.owners is not None:
                self.owners.append(torch_private.newest_node())
        keys = op.keys(args, kwargs)
        saves = self.policy.saves(keys) if op.is_attention else True
        # On the tape before it runs: a call that raises, where the block then tries another kernel, does so again.
        entry = Entry(op, keys, described(args), product)
        self.entries.append(entry)
        before = self._prepare(entry, args, kwargs) if saves and op.kind != "choice" else None
        outputs = self.run(op, keyset, args, kwargs)
        entry.ran = True
        if op.is_attention:
            self.made.append((op, keys))
        if not saves:
            return outputs
        if op.kind == "choice":
            entry.keep_choice(outputs, args[0].shape[op.argument("dim", args, kwargs)])
            return outputs
        if before:
            after = [(device, generator_state(device)) for device in before]
            entry.generators = [(device, state) for device, state in after if not torch.equal(state, before[device])]
            if entry.generators and not op.draws(args, kwargs):
                self.denied.append(op)
        # autograd guards the output of a differentiable call: an in-place change is noticed. Elsewhere nobody does:
        # inside an autograd.Function (compiled code, custom ops) buffers are reused, and where no input requires
        # grad the user may write into the output. Keep a copy there.
        guarded = is_differentiable(args) and (not product or op.name == releases.WHOLE_PRODUCT)
        entry.keep(outputs, guarded, not guarded, self.hooks)
        if product:
            self.products.append(product)
        if op.is_opaque:
            entry.companion = engine.opaque[args[-1]].companion
        return outputs

    def _prepare(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Before a call runs that is to be saved. Returns the generators' states, where it may draw."""
        op = entry.op
        what = f"the Linear module {entry.product!r}" if entry.product else op.name
        # A call of a nested region, whose checkpoint is fastac's, comes while that one's scope is open.
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
        watched = op.is_attention and self.owners is not None  # whatever the row says
        if self.preserves_generators and (watched or (op.may_draw and op.draws(args, kwargs))):
            return {device: generator_state(device) for device in devices_of(args)}
        return None

    def _communicate(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep what a collective returns that returns no more than it was given, unless the policy recomputes it."""
        communication = self.communication
        if op.kind == "wait":
            outputs = self.run(op, keyset, args, kwargs)
            if communication is not None:
                communication.complete(args[0])
            return outputs
        if communication is None:
            communication = self.communication = Communication()
        entry = Entry(op, 0, inputs_of(args))
        if op.kind == "exchange":
            self.entries.append(entry)
        outputs = self.run(op, keyset, args, kwargs)
        entry.ran = True
        communication.forward(outputs)
        if op.kind == "exchange" and self.policy.saves_collectives:
            guarded = is_differentiable(args)
            entry.keep(outputs, guarded, copied=False)
            communication.keep(entry.kept or (), None if guarded else entry.copy)
        return outputs

    def result(self, compiled: bool = False, writing: int = 0) -> RegionResult:
        """What the region did, in numbers: it holds no tensor."""
        attention = [entry for entry in self.entries if entry.op.is_attention and entry.ran]
        return RegionResult(
            made=tuple(self.made),
            calls=tuple(
                Call(one.op.name, int(one.keys), one.kept is not None, one.saved_bytes, one.extra_bytes)
                for one in attention
            ),
            products=tuple(Product(one.product, one.saved_bytes) for one in self.entries if one.product),
            choice_bytes=sum(one.saved_bytes for one in self.entries if one.op.kind == "choice"),
            compiled=compiled,
            writing=writing,
        )


class Replay(Scope):
    """One recompute of a region: returns what was kept, in the order of the calls, and runs what was not."""

    position = 0

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.policy = tape.policy

    def __enter__(self) -> Replay:
        running = torch_private.running_backward()
        if running != thread.backward:
            thread.backward, thread.replayed = running, []
        thread.replayed.append((self.tape.first_node, self.tape.last_node, self.policy))
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        # A recompute ends early by an exception; one that came to its end must have made the same calls.
        if exception[0] is None and self.position != len(self.tape.entries):
            missing = self.tape.entries[self.position]
            raise _another_path(f"ended before {readable(missing.op, missing.inputs, missing.product)}", "made it")

    def meet(self, op: BoundOp, keyset: Any, args: Sequence[Any], kwargs: Mapping[str, Any], product: str) -> Any:
        if op.kind in ("decomposition", "wait"):
            return self.run(op, keyset, args, kwargs)
        communication = self.tape.communication
        if op.kind == "gather":
            outputs = self.run(op, keyset, args, kwargs)
            if communication is not None:
                communication.repeat(outputs)
            return outputs
        entry = self._next(op, inputs_of(args) if op.kind == "exchange" else described(args), product)
        if entry.kept is None:
            outputs = self.run(op, keyset, args, kwargs)
            if op.kind == "exchange" and communication is not None:
                communication.repeat(outputs)
            return outputs
        set_states(entry.generators)  # what runs next must draw what it drew before
        for counter in engine.answered if op.is_attention else ():
            counter[op.qualified_name.partition(".")[0]] += 1
        if entry.selection is not None:
            entry.selection.put_into(op, op.selection(args, kwargs))
        if op.is_opaque:
            engine.opaque[args[-1]].companion = entry.companion
        return entry.hand_out()

    def _next(self, op: BoundOp, inputs: Sequence[Any], product: str) -> Entry:
        """The entry of the call that recompute makes now. Raises FastacError where the forward made another."""
        if self.position >= len(self.tape.entries):
            if not self.tape.complete:
                return Entry(op, 0, inputs)
            raise _another_path(f"called {readable(op, inputs, product)}", "had ended")
        entry = self.tape.entries[self.position]
        # By name: torch may hand out another object for the same op once an older definition of it is collected.
        if (
            entry.inputs != inputs
            or entry.product != product
            or (entry.op is not op and entry.op.qualified_name != op.qualified_name)
        ):
            calls = (op, inputs, product), (entry.op, entry.inputs, entry.product)
            here, forward = (readable(*call) for call in calls)
            if here == forward:
                here, forward = (readable(*call, strides=True) for call in calls)
            raise _another_path(f"called {here}", f"called {forward}")
        self.position += 1
        return entry


class RecomputeError(FastacError, CheckpointError):
    """A recompute that is not what the forward was. Code that expects torch's CheckpointError catches it."""

    __str__ = Exception.__str__  # one that stands for a KeyError of the recompute is a KeyError, too

    def __reduce__(self) -> Any:
        return RecomputeError, self.args


def _another_path(recompute: str, forward: str) -> RecomputeError:
    return RecomputeError(
        f"recompute {recompute} where the forward {forward}: the checkpointed function took another path, or chose "
        f"otherwise, or the attention backend changed in between, or a cache (use_cache=True) was filled. Make it "
        f"depend on its arguments alone."
    )
