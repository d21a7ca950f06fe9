"""The recompute of a region: what its tape holds is handed out again, in order; the rest runs.

`Replay.call` is what happens to an attention call. Every call is checked against the one that the forward made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastac import torch_internals
from fastac.choices import Reader
from fastac.collectives import inputs_of
from fastac.entries import Entry, described, readable
from fastac.errors import FastacError
from fastac.preservation import set_generator_state
from fastac.registry import ResolvedOp
from fastac.scopes import Scope, Tape, run_kernel


class Replay(Scope):
    """The recompute of a region: returns what was kept, runs what was not."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.position = 0
        self.choices = Reader(tape.choices)

    def __enter__(self) -> Replay:
        self.position = 0
        self.choices.used.clear()
        self.handles = self.tape.watch()  # fastac may have been disabled since the forward
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for handle in self.handles:
            handle.remove()
        # torch ends a recompute early by an exception; one that came to its end must have made the same calls.
        if exception[0] is None and self.position != len(self.tape):
            raise FastacError(
                f"recompute made {self.position} {self._calls} where the forward made {len(self.tape)}: the "
                f"checkpointed function took another path. Make it depend on its arguments alone."
            )

    def call(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.passes_by(resolved, args):
            return self.let_by(resolved, keyset, args, kwargs)
        entry = self._next(resolved, described(args))
        if entry.kept is None:
            self.position += 1
            return self.run(resolved, keyset, args, kwargs)
        return self._replay(entry, resolved, args, kwargs)

    def multiply(
        self, linear: str, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the product of a Linear module that the forward kept."""
        entry = self._next(resolved, described(args), linear)
        if entry.linear != linear:
            raise FastacError(
                f"recompute runs the Linear module {linear!r} where the forward ran {entry.linear!r}: the checkpointed "
                f"function took another path. Make it depend on its arguments alone."
            )
        if entry.kept is None:
            self.position += 1
            return run_kernel(resolved, keyset, args, kwargs)
        return self._replay(entry, resolved, args, kwargs)

    def communicate(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a collective returned in the forward; issue again what was not kept."""
        kind = resolved.row.kind  # type: ignore[union-attr]
        if self.passes_by(resolved, args):
            return self.let_by(resolved, keyset, args, kwargs)
        if kind == "wait":
            return self.run(resolved, keyset, args, kwargs)
        if kind == "exchange":
            entry = self._next(resolved, inputs_of(args))
            if entry.kept is not None:
                return self._replay(entry, resolved, args, kwargs)
            self.position += 1
        outputs = self.run(resolved, keyset, args, kwargs)
        if self.tape.communication is not None:
            self.tape.communication.repeat(outputs)
        return outputs

    @property
    def _calls(self) -> str:
        kinds = ["attention calls", *["products"] * bool(self.tape.linears)]
        kinds += ["collectives"] * (self.tape.communication is not None)
        return " and ".join((", ".join(kinds[:-1]), kinds[-1])) if len(kinds) > 1 else kinds[0]

    def _next(self, resolved: ResolvedOp, inputs: Sequence[Any], linear: str = "") -> Entry:
        """The entry of the call that recompute makes now. Raises FastacError where it is another one.

        linear: the Linear module whose product it is.
        """
        if self.position >= len(self.tape):
            raise FastacError(
                f"recompute called {resolved.name} after the {len(self.tape)} {self._calls} the forward made: the "
                f"checkpointed function took another path. Make it depend on its arguments alone."
            )
        entry = self.tape[self.position]
        if entry is None:
            raise FastacError(
                "this checkpointed region was backpropagated already and its saved outputs are freed. Use "
                "retain_graph=True on the first backward to go through it again. A schedule that computes gradients of "
                'inputs and of weights apart (zero bubble) goes through it many times: use policy="full" there.'
            )
        # By name: torch may hand out another object for the same op once an older definition of it is collected.
        if entry.resolved.qualified_name != resolved.qualified_name or entry.inputs != inputs:
            kind = "attention call" if resolved.is_attention else "collective"
            if resolved.is_linear:
                kind = f"the product of the Linear module {linear!r}, call"
            recorded = entry.resolved.name + f" of {entry.linear!r}" * bool(entry.linear)
            raise FastacError(
                f"{kind} {self.position} of recompute is not the one of the forward: {resolved.name} on "
                f"{readable(inputs)} where {recorded} on {readable(entry.inputs)} was recorded. "
                f"The checkpointed function took another path, or the attention backend changed in between."
            )
        return entry

    def _replay(self, entry: Entry, resolved: ResolvedOp, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # A backward inside the region replays what the forward that is still open will be asked for again.
        keep_graph = torch_internals.keeps_graph() or self.tape.recording
        position, self.position = self.position, self.position + 1
        kept: Sequence[Any] = entry.kept or ()
        if torch_internals.versions(kept) != entry.versions:
            raise FastacError(
                f"the output of {resolved.name} was changed in place after it was saved, so recompute can not use it. "
                f'Replace the in-place operation, or use policy="full" for this block.'
            )
        for device, state in entry.generator_states.items():
            set_generator_state(state, device)  # what runs next must draw what it drew before
        if entry.selection is not None:
            entry.selection.put_into(resolved, resolved.selection(args, kwargs))
        outputs = kept
        if not keep_graph:
            self.tape[position] = None
        else:  # for a second backward; an output that nobody guards must not be handed out itself
            outputs = torch_internals.aliases(outputs) if entry.guarded else torch_internals.clones(outputs)
        return outputs[0] if entry.single else outputs

    def choose(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Choose as the forward did."""
        run = functools.partial(super().choose, resolved, keyset, args, kwargs)
        if self.passes_by(resolved, args):
            return run()
        return self.choices.choose(resolved, args, kwargs, run, self.inner())
