"""One training step on a rank: what it computed, and what ran, by torch's profiler.

Counted are attention kernels and collectives of gloo as they are executed, in forward and backward. A counting kernel
(tests/support.py) would hold the GIL while it runs, and may hang with collectives.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests import support
from tests.support import CPU_ATTENTION, Tensors

Counts = tuple[int, int]


@dataclasses.dataclass
class Measured:
    """One step. tensors: loss, outputs, gradients, by name; attention: kernels that ran in forward and in backward.

    forward, backward: collectives of gloo or NCCL, by name, such as "gloo:all_to_all".
    """

    tensors: Tensors
    attention: Counts
    forward: Counter[str]
    backward: Counter[str]

    @property
    def collectives(self) -> Counts:
        """How many collectives of any kind ran in forward and in backward."""
        return self.forward.total(), self.backward.total()


def measured(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], torch.Tensor] = support.loss_of,
    attention: str | Collection[str] = CPU_ATTENTION,
    accumulate: bool = False,
) -> Measured:
    """Forward and backward of a model on this rank.

    accumulate: on top of the gradients that there are, which are taken away before otherwise. They stay afterwards.
    """
    if not accumulate:
        model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        outputs = model(**batch)
        loss = loss_of(outputs)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    tensors = {"loss": loss.detach()} | support.flat_tensors(outputs, "output")
    tensors |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"gradient of {name}": t.grad for name, t in batch.items() if getattr(t, "grad", None) is not None}
    return Measured(
        {name: whole(tensor) for name, tensor in tensors.items()},
        (_runs(forward, attention), _runs(backward, attention)),
        collectives(forward),
        collectives(backward),
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with all of its shards. Every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _events(profiled: profile) -> list[Any]:
    """What the profiler saw, as it recorded it: to make a tree of it takes longer than a small step."""
    results: Any = profiled.profiler.kineto_results  # type: ignore[union-attr]
    return list(results.events())


def _runs(profiled: profile, attention: str | Collection[str]) -> int:
    """Executions of a kernel. A call whose output is replayed is an event, too; one that runs allocates its output."""
    events = _events(profiled)
    names = (attention,) if isinstance(attention, str) else attention
    calls = [event for event in events if event.name() in names]
    allocations = [event for event in events if event.name().startswith("aten::empty")]
    # Where one call is inside another, the inner one allocates for both.
    innermost = [call for call in calls if not any(other is not call and _inside(other, call) for other in calls)]
    return sum(any(_inside(allocation, call) for allocation in allocations) for call in innermost)


def _inside(event: Any, other: Any) -> bool:
    """Whether one event lies within another, of the same thread."""
    begins = other.start_ns() <= event.start_ns() and event.end_ns() <= other.end_ns()
    return bool(begins and event.start_thread_id() == other.start_thread_id())


def collectives(profiled: profile) -> Counter[str]:
    """Collectives of gloo or NCCL that ran, by name, such as "gloo:all_to_all"."""
    names = [event.name() for event in _events(profiled)]
    return Counter(name for name in names if name.startswith(("gloo:", "nccl:")))
