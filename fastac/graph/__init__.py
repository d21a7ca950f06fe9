"""The same policy on graphs that were traced: partitioned joint graphs, and compiles on top of them."""

from __future__ import annotations

from fastac.graph.gathers import parameter_gathers, recompute_parameter_gathers
from fastac.graph.marks import held_bytes, mark_saved
from fastac.graph.partitioning import partitioner
from fastac.graph.round_trip import replaying_partitioner

__all__ = [
    "held_bytes",
    "mark_saved",
    "parameter_gathers",
    "partitioner",
    "recompute_parameter_gathers",
    "replaying_partitioner",
]
