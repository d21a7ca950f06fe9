"""torch.nn.attention.flex_attention: a higher-order op in eager mode. NABLA is such a call, with a block mask.

`fastac.compile` and `fastac.compile_attention` compile it by inductor and keep it an op (fastac/compiled/flex.py). If
only torch compiles it, no call is left to see, and the region is refused. In a model compiled as a whole, checkpointing
is part of the graph and saves it. A tensor that requires grad and is used by a `score_mod` gets a wrong gradient in
eager mode under any checkpointing, torch's own included (torch 2.13).
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(
    backend="flex",
    name="flex_attention, NABLA",
    verdict=Verdict.SAVABLE,
    how="its higher-order op in eager mode; an op of fastac's if fastac compiles it",
    advice="compile it by fastac.compile_attention, or its blocks by fastac.compile, rather than by torch.compile",
)

_row = partial(AttentionOp, backend="flex", name="flex_attention", layout="bhsd", dropout=None)

ROWS = (
    # A higher-order op has no namespace in the dispatcher. Rows use this word for it.
    _row(namespace="higher_order", flops=Flops(backward="flex_attention_backward")),
    # Inductor compiles its backward into the code around it, so there is no backward op to count.
    _row(namespace="fastac_compiled"),
)
