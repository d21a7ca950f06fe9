"""The tape of one region: attention outputs, and what they depend on, recorded in forward, replayed in recompute.

Reading order: `Record.call` is what happens to an attention call in the forward, `Replay.call` in `fastac.replay` what
happens to it in the recompute. Both are reached from `fastac.interception`, below autograd, with the thread's open
scope. Every guard here was put in after a run with wrong gradients; `tests/test_tape.py` has one test for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastac import torch_internals
from fastac.collectives import Communication, inputs_of
from fastac.entries import Entry, described
from fastac.errors import PolicyNotAppliedError
from fastac.policy import Policy
from fastac.preservation import devices_of, generator_state
from fastac.recognition import Decomposed
from fastac.registry import ResolvedOp
from fastac.scopes import Scope, Tape, run_kernel, thread
from fastac.selection import Selection

WHOLE_PRODUCT = "aten.addmm.default"
"""The op whose output is that of the Linear module. To that of others it adds its bias in place, and hands it out under
another version counter (aten::_unsafe_view), by which no change of it is noticed."""


def is_differentiable(args: Sequence[Any]) -> bool:
    """Whether autograd differentiates through a call of these arguments."""
    if not torch.is_grad_enabled():
        return False
    for value in args:  # noqa: SIM110 a generator costs more than the rest
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


class Record(Scope):
    """The forward of a region: runs each attention call and keeps what the policy saves.

    preserves_generators: whether torch puts generators back around the recompute; where it does not, nor does the tape.
    observer: a context that watches the forward as well (the census of a region seen for the first time).
    """

    def __init__(
        self,
        tape: Tape,
        policy: Policy,
        preserves_generators: bool = True,
        observer: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(tape)
        self.policy = policy
        self.preserves_generators = preserves_generators
        self.observer = observer
        self.entered = False
        self.products: list[str] = []  # the Linear modules whose outputs are on the tape, by name
        self.ops = tape.ops
        self.calls: list[ResolvedOp] = []
        self.keys: list[int] = []  # over how many each call on the tape attends
        self.owners: list[int] = []  # the autograd node that each call belongs to
        self.missed: list[Decomposed] = []
        self.late: list[str] = []  # ops that were intercepted too late to be saved here
        self.checkpoint: object = None  # the one that this is the forward of

    def __enter__(self) -> Record:
        if self.observer is not None:
            self.checkpoint = torch_internals.innermost_checkpoint()
            self.observer.__enter__()
        self.entered = self.tape.recording = True
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self.observer is not None:
                self.observer.__exit__(*exception)  # type: ignore[arg-type]
        finally:
            self.tape.recording = False
            if self.tape.communication is not None:
                self.tape.communication.pending.clear()  # what is waited for outside is guarded by its version alone
            super().__exit__(*exception)

    def call(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.passes_by(resolved, args):
            if not torch_internals.has_stand_ins(args):
                self.late.append(resolved.name)
            return self.let_by(resolved, keyset, args, kwargs)
        owner = torch_internals.newest_node()
        keys = resolved.keys(args, kwargs)
        saves = self.policy.saves(keys)
        if saves and self.observer is not None and thread.scope is self:
            self._refuse_inner_checkpoint(resolved)
        # On the tape before it runs: a call that raises, where the block then tries another kernel, does so again.
        entry = Entry(resolved, keys, described(args))
        self.tape.append(entry)
        self.keys.append(keys)
        before: dict[torch.device, torch.Tensor] = {}
        if not resolved.trains:
            resolved.check_trains()
        if saves:
            if resolved.written:
                resolved.check_writes(args, kwargs)
            if resolved.may_draw and self.preserves_generators and resolved.draws(args, kwargs):
                before = {device: generator_state(device) for device in devices_of(args)}
            if resolved.has_selection:
                entry.selection = Selection(resolved.selection(args, kwargs))
        outputs = self.run(resolved, keyset, args, kwargs)
        self.calls.append(resolved)
        self.owners.append(owner)
        if not saves:
            return outputs
        if before:
            after = {device: generator_state(device) for device in before}
            entry.generator_states = {
                device: state for device, state in after.items() if not torch.equal(state, before[device])
            }
        # autograd guards the output of a differentiable call: an in-place change is noticed. Elsewhere nobody does:
        # inside an autograd.Function (compiled code, custom ops) buffers are reused, and where no input requires
        # grad the user may write into the output. Keep a copy there.
        guarded = is_differentiable(args)
        entry.keep(outputs, guarded, copied=not guarded)
        return outputs

    @property
    def communication(self) -> Communication | None:
        """What the collectives of the region did; None where it has none."""
        return self.tape.communication

    def _refuse_inner_checkpoint(self, resolved: ResolvedOp) -> None:
        if torch_internals.innermost_checkpoint() not in (None, self.checkpoint):
            raise PolicyNotAppliedError(
                f"{self.policy}: {resolved.name} is called inside a torch.utils.checkpoint of the block's own, which "
                f"runs it again in backward. Use fastac.checkpoint there, or leave that checkpoint out."
            )

    def choose(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Keep what was chosen: attention that is saved may depend on it."""
        outputs = super().choose(resolved, keyset, args, kwargs)
        if not self.passes_by(resolved, args):
            self.tape.choices.keep(resolved, args, kwargs, outputs, self.inner())
        return outputs

    def communicate(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Keep what a collective returns that returns no more than it was given, unless the policy recomputes it."""
        if self.passes_by(resolved, args):
            return self.let_by(resolved, keyset, args, kwargs)
        communication = self.tape.communication
        kind = resolved.row.kind  # type: ignore[union-attr]
        if kind == "wait":
            outputs = self.run(resolved, keyset, args, kwargs)
            if communication is not None:
                communication.complete(args[0])
            return outputs
        if communication is None:
            communication = self.tape.communication = Communication()
        entry = None
        if kind == "exchange":
            entry = Entry(resolved, 0, inputs_of(args))
            self.tape.append(entry)
        outputs = self.run(resolved, keyset, args, kwargs)
        communication.forward(outputs)
        if entry is not None and self.policy.saves_collectives:
            communication.keep(entry, outputs, guarded=is_differentiable(args))
        return outputs

    def multiply(
        self, linear: str, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Keep the product of a Linear module."""
        if self.observer is not None:
            self._refuse_inner_checkpoint(resolved)
        entry = Entry(resolved, 0, described(args))
        entry.linear = linear
        self.tape.append(entry)
        self.products.append(linear)
        outputs = run_kernel(resolved, keyset, args, kwargs)
        guarded = is_differentiable(args) and resolved.name == WHOLE_PRODUCT
        entry.keep(outputs, guarded, copied=not guarded)
        return outputs

    def see_inside(self, module: torch.nn.Linear) -> None:
        """Raise PolicyNotAppliedError for a module that this region's policy names: it runs again with that one."""
        name = self.tape.linears.get(id(module))
        if name is not None:
            raise PolicyNotAppliedError(
                f"{self.policy}: the Linear module {name!r} is called inside a fastac.checkpoint of the block's own, "
                f"which runs again as a whole. Give that one a policy with linear=..., and name in this one modules "
                f"outside it alone."
            )

    def decomposed(self, resolved: ResolvedOp, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        found = Decomposed.from_call(resolved, args, kwargs)
        if self.policy.saves(found.keys):
            self.missed.append(found)
        super().decomposed(resolved, args, kwargs)
