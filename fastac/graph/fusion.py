"""Inductor's scheduler fuses operators of one region's recomputation with those of that region alone.

Operators that share an input, such as the rotary frequencies of a model, are fused wherever they stand, and a kernel
that computes them for several blocks needs the recomputed tensors of all these blocks at one time. The graph is right
before and after every pass over it, so that nothing but the scheduler's choices can prevent this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.fx import Graph

from fastac.graph.internals import inductor_choosing, origins
from fastac.graph.nodes import is_backward, recomputed_region, region_of

PART = "fastac_part"
"""Where a node of inductor's graph has its `Part` (`node.meta`)."""


class Part(NamedTuple):
    """A stretch of a step: a forward, with what its backward does before it recomputes, or a recomputed region."""

    number: int
    recomputes: bool


def number_parts(graph: Graph) -> None:
    """Tell the parts of a step apart, by the order of its nodes.

    Called with the graph that inductor lowers; its scheduler sees the same nodes.
    """
    part, last, in_backward = Part(0, recomputes=False), None, False
    for node in graph.nodes:
        region = recomputed_region(node)
        if region is not None and region != last:  # also one that another backward has recomputed
            last = region
            part = Part(part.number + 1, recomputes=True)
        elif in_backward and region_of(node) is not None:  # the forward of another micro-batch
            part = Part(part.number + 1, recomputes=False)
            in_backward = False
        in_backward = in_backward or is_backward(node)
        node.meta[PART] = part


class _WithinParts:
    """Inductor's choices, and no fusion of operators of two parts."""

    def __init__(self, choices: Any) -> None:
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choices, name)

    def can_fuse(self, scheduler: Any, first: Any, second: Any, score: int) -> bool:
        """Whether the scheduler may fuse two of its nodes."""
        return _part_of(first) == _part_of(second) and self._choices.can_fuse(scheduler, first, second, score)


def _part_of(scheduled: Any) -> Part | None:
    """The part that an operator runs in: the last of the nodes that went into it. Each of several has the same."""
    return max((node.meta[PART] for node in origins(scheduled) if PART in node.meta), default=None)


def mixed(scheduled: Iterable[Any]) -> list[str]:
    """The kernels, by name, that compute what several regions recompute, or a forward with what a region recomputes."""
    return [one.get_name() for one in scheduled if len(_parts_recomputed_in(one)) > 1]


def _parts_recomputed_in(kernel: Any) -> set[Part]:
    """The parts whose recomputation a kernel holds, and those whose forward."""
    parts = set()
    for operation in kernel.get_nodes():
        part = _part_of(operation)
        recomputes = any(recomputed_region(node) is not None for node in origins(operation))
        if part is not None and recomputes == part.recomputes:
            parts.add(part)
    return parts if any(part.recomputes for part in parts) else set()


@contextlib.contextmanager
def within_parts() -> Iterator[None]:
    """In which inductor fuses within parts only."""
    with inductor_choosing(_WithinParts):
        yield
