"""The same policy on traced graphs: trace a training step, apply a policy to it, run or compile it.

    step = fastac.graph.apply(fastac.graph.trace(step, model, *args), "attn_only")

`apply` is `functionalize`, `tag` and `rematerialize`, which take and return a GraphModule and may be used one by one.
For compilers on top of AOT: `partitioner`, and `replaying_partitioner` for what was partitioned already.
Not imported by `import fastac`.
"""

from fastac.graph.application import apply, check
from fastac.graph.compilation import compile, compile_step  # noqa: A004
from fastac.graph.functionalization import functionalize
from fastac.graph.gathers import parameter_gathers, recompute_parameter_gathers
from fastac.graph.marks import held_bytes, mark_saved
from fastac.graph.partitioning import partitioner
from fastac.graph.rematerialization import rematerialize
from fastac.graph.round_trip import replaying_partitioner
from fastac.graph.tagging import tag
from fastac.graph.tracing import Traced, trace

__all__ = [
    "Traced",
    "apply",
    "check",
    "compile",
    "compile_step",
    "functionalize",
    "held_bytes",
    "mark_saved",
    "parameter_gathers",
    "partitioner",
    "recompute_parameter_gathers",
    "rematerialize",
    "replaying_partitioner",
    "tag",
    "trace",
]
