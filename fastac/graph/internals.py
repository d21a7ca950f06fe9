"""Everything private of torch that fastac.graph uses, in one place.

Seen in torch 2.13. Each name is looked up at import, and one that went away is an ImportError that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch._functorch.partitioners
import torch._inductor.custom_graph_pass
from torch.fx import Node

SEEN_IN = ("2.13",)

_REQUIRED = (
    "_functorch.partitioners.min_cut_rematerialization_partition",
    "_inductor.custom_graph_pass.CustomPartitionerFn",
    "_ops.OpOverload",
)


def missing(names: Iterable[str] = _REQUIRED) -> list[str]:
    """Names, relative to `torch`, that this build of torch does not have."""
    absent = []
    for name in names:
        try:
            operator.attrgetter(name)(torch)
        except AttributeError:
            absent.append(name)
    return absent


if _absent := missing():
    raise ImportError(
        f"fastac.graph needs {', '.join('torch.' + name for name in _absent)}, which torch {torch.__version__} does "
        f"not have. It was seen in torch {', '.join(SEEN_IN)}: install one of these, or a newer fastac."
    )

min_cut = torch._functorch.partitioners.min_cut_rematerialization_partition
"""torch's partitioner: it decides by dependency which nodes belong to the backward, and obeys meta["recompute"]."""

CustomPartitioner: Any = torch._inductor.custom_graph_pass.CustomPartitionerFn
"""What inductor's `custom_partitioner_fn` must be an instance of."""

COLLECTIVES = "_c10d_functional"
"""Namespace of the functional collectives."""


def is_tangent(node: Node) -> bool:
    """Whether a placeholder of a joint graph holds a gradient that comes in."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def says_parameter(node: Node) -> bool | None:
    """Whether AOT says that a placeholder of a joint graph is a parameter; None where it says nothing."""
    description = node.meta.get("desc")
    return None if description is None else bool(description.is_param())


def schema_of(node: Node) -> torch.FunctionSchema | None:
    """The schema of the op that a node calls; None for anything that is not an op of the dispatcher."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
