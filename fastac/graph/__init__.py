"""The same policy on traced graphs: trace a training step, apply a policy to it, run or compile it.

    step = fastac.graph.apply(fastac.graph.trace(step, model, *args), "attn_only")

`apply` is `functionalize`, `tag` and `rematerialize`, which take and return a GraphModule and may be used one by one.
Not imported by `import fastac`.
"""

from fastac.graph.application import apply, check
from fastac.graph.compilation import compile, compile_step  # noqa: A004
from fastac.graph.functionalization import functionalize
from fastac.graph.rematerialization import rematerialize
from fastac.graph.tagging import tag
from fastac.graph.tracing import Traced, trace

__all__ = ["Traced", "apply", "check", "compile", "compile_step", "functionalize", "rematerialize", "tag", "trace"]
