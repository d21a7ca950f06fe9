"""Inductor's scheduler fuses operators of one region's recomputation with those of that region alone.

Operators that share an input, such as the rotary frequencies of a model, are fused wherever they stand, and a kernel
that computes them for several blocks needs the recomputed tensors of all these blocks at one time. The graph is right
before and after every pass over it, so that nothing but the scheduler's choices can prevent this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph

from fastac.graph.internals import inductor_choosing, origins
from fastac.graph.nodes import recomputed_region

_PART = "fastac_part"
"""Which part of the step a node of inductor's graph belongs to (`node.meta`): each recomputed region begins one."""


def number_parts(graph: Graph) -> None:
    """Number the parts of a step: the forward is 0, and each recomputed region begins a new one.

    Called with the graph that inductor lowers; its scheduler sees the same nodes.
    """
    part, regions = 0, set()
    for node in graph.nodes:
        region = recomputed_region(node)
        if region is not None and region not in regions:
            regions.add(region)
            part += 1
        node.meta[_PART] = part


class _WithinParts:
    """Inductor's choices, and no fusion of operators of two parts."""

    def __init__(self, choices: Any) -> None:
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choices, name)

    def can_fuse(self, scheduler: Any, first: Any, second: Any, score: int) -> bool:
        """Whether the scheduler may fuse two of its nodes."""
        return _part_of(first) == _part_of(second) and self._choices.can_fuse(scheduler, first, second, score)


def _part_of(scheduled: Any) -> int:
    """The part that an operator runs in: the last of the nodes that went into it. Each of several has the same."""
    return max((node.meta.get(_PART, 0) for node in origins(scheduled)), default=0)


def mixed(scheduled: Iterable[Any]) -> list[str]:
    """The kernels, by name, that compute what several regions recompute, or what the forward does as well."""
    return [one.get_name() for one in scheduled if len(_parts_recomputed_in(one)) > 1]


def _parts_recomputed_in(kernel: Any) -> set[int]:
    """The parts whose recomputation a kernel holds, and 0 when it holds some of the forward."""
    parts = set()
    for operation in kernel.get_nodes():
        part = _part_of(operation)
        if part == 0 or any(recomputed_region(node) is not None for node in origins(operation)):
            parts.add(part)
    return parts


@contextlib.contextmanager
def within_parts() -> Iterator[None]:
    """In which inductor fuses within parts only."""
    with inductor_choosing(_WithinParts):
        yield
