"""The same policy on traced graphs: trace a training step, apply a policy to it, run or compile it.

    step = fastac.graph.apply(fastac.graph.trace(step, model, *args), "attn_only")

`apply` is `functionalize`, `tag` and `rematerialize`, which take and return a GraphModule and may be used one by one.
For compilers on top of AOT: `partitioner`, and `replaying_partitioner` for graphs that are partitioned already.
`import fastac` does not import this.
"""

import fastac
from fastac.graph.application import apply, compile  # noqa: A004
from fastac.graph.partitioning import partitioner, recompute_parameter_gathers
from fastac.graph.passes import functionalize, rematerialize, tag
from fastac.graph.round_trip import replaying_partitioner
from fastac.graph.saved_values import held_bytes, mark_saved
from fastac.graph.tracing import Traced, trace

fastac._load()  # now, and not in a trace: imports may draw random numbers

__all__ = [
    "Traced",
    "apply",
    "compile",
    "functionalize",
    "held_bytes",
    "mark_saved",
    "partitioner",
    "recompute_parameter_gathers",
    "rematerialize",
    "replaying_partitioner",
    "tag",
    "trace",
]
