"""torch.nn.attention.flex_attention: a higher-order op in eager mode. NABLA is such a call, with a block mask.

Where inductor compiles it, `fastac.compile` and `fastac.compile_attention` leave it an op (fastac/compile/flex.py).
Compiled by torch alone no call is left to see, and the region is refused; in a model that is compiled as a whole,
checkpointing is in the graph, and saves it. A tensor that requires grad and that a `score_mod` uses gets a wrong
gradient in eager mode under any checkpointing, torch's own as well (torch 2.13).
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(
    backend="flex",
    name="flex_attention, NABLA",
    verdict=Verdict.SAVABLE,
    how="its higher-order op in eager mode, an op of fastac's where fastac compiles it",
    advice="compile it by fastac.compile_attention, or its blocks by fastac.compile, rather than by torch.compile",
)

_row = partial(AttentionOp, backend="flex", name="flex_attention", layout="bhsd", dropout=None)

ROWS = (
    _row(
        namespace="higher_order", flops=Flops(backward="flex_attention_backward")
    ),  # whose FLOPs torch has a formula for
    _row(namespace="fastac_compiled"),  # whose backward inductor compiles into what surrounds it
)
