"""What a plan says: what each policy holds and recomputes in one step, as values and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fastac.policy import Policy
from fastac.reporting import render
from fastac.shares import summary
from fastac.sizes import readable_bytes

NOT_MODELLED = (
    "counted are the tensors that operators return; not what the allocator rounds up or can not use, workspaces inside "
    "kernels (attention backward, matrix products), temporaries of the optimizer, the CUDA context, other models",
    "fused norms or rotary kernels hold less than the operators that are simulated",
)


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """What one policy does in one step. Bytes on one device.

    saved_bytes: outputs that are saved. held_bytes: all that is alive between forward and backward, these among it.
    peak_bytes: the most that is allocated at one time: weights, gradients, states of the optimizer, activations.
    flops: of forward, recompute and backward. relative: to those of full checkpointing.
    """

    policy: str
    saved_bytes: int
    held_bytes: int
    peak_bytes: int
    recomputed_flops: int
    flops: int
    relative: float


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes on one device besides what a step allocates: weights, the optimizer's, weights that are gathered."""

    weights: int
    optimizer: int
    gathered: int = 0

    @property
    def together(self) -> int:
        """All of them."""
        return self.weights + self.optimizer + self.gathered


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plans of several policies, for one model and one size of inputs.

    states: of the model. gradients: bytes of its gradients, which the peak of every policy has in it. frontier: bytes
    that are saved and FLOPs relative to full checkpointing, for growing budgets. blocks: what each block saves under
    the budget that was asked for, as `fastac.enable` takes it. largest: policy -> frames of the longest video whose
    step fits `memory`, 0 for none. budget: bytes that were asked for, or the most with which a step fits `memory`.
    """

    subject: str
    inputs: str
    states: States
    gradients: int
    policies: tuple[PolicyPlan, ...]
    frontier: tuple[tuple[int, float], ...]
    blocks: Mapping[str, Policy] = dataclasses.field(default_factory=dict)
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    budget: int | None = None
    notes: tuple[str, ...] = NOT_MODELLED

    def as_json(self) -> dict[str, Any]:
        """The plan in what JSON has."""
        found = dataclasses.asdict(self)
        found["blocks"] = {name: dataclasses.asdict(policy) for name, policy in self.blocks.items()}
        return found

    def __str__(self) -> str:
        table = Table(
            title=f"{self.subject}: {self.inputs}",
            title_justify="left",
            caption="\n".join(self._captions()),
            caption_justify="left",
        )
        headings = ["policy", "saved", "held", "peak", "TFLOPs run again", "FLOPs of full"]
        headings += [f"longest video in {readable_bytes(self.memory or 0)}"] * bool(self.largest)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
        for one in self.policies:
            table.add_row(
                f"{one.policy} (torchtitan)" if one.policy == "ops" else one.policy,
                *map(readable_bytes, (one.saved_bytes, one.held_bytes, one.peak_bytes)),
                f"{one.recomputed_flops / 1e12:,.4g}",
                f"{one.relative:.3f}",
                *[_frames(self.largest.get(one.policy))] * bool(self.largest),
            )
        return render(table)

    def _captions(self) -> list[str]:
        states = self.states
        parts = [f"weights {readable_bytes(states.weights)}", f"gradients {readable_bytes(self.gradients)}"]
        parts += [f"optimizer {readable_bytes(states.optimizer)}"]
        parts += [f"gathered {readable_bytes(states.gathered)}"] * bool(states.gathered)
        lines = [f"peak: with {', '.join(parts)}"]
        if self.blocks:
            lines.append(f"budget: {summary(self.blocks.values())}")
        if self.memory is not None:
            lines.append(
                f"memory: {readable_bytes(self.memory)}, nothing of it kept back for what is not counted: ask for a "
                f"tenth less than the device has"
            )
            if next(one for one in self.policies if one.policy == "full").peak_bytes > self.memory:
                lines.append("no policy fits: fewer frames, LoRA, more GPUs or context parallelism would hold less")
        return lines + list(self.notes)


def _frames(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count} frame{'s' * (count > 1)}" if count else "does not fit"
