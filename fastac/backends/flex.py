"""torch.nn.attention.flex_attention: a higher-order op in eager mode. NABLA is such a call, with a block mask.

`torch.compile(flex_attention)` is inductor's code, in which no call is left to see: a region with it is refused.
"""

from fastac.rows import AttentionOp, Library, Verdict

LIBRARY = Library(
    backend="flex",
    name="flex_attention",
    verdict=Verdict.SAVABLE,
    how="its higher-order op in eager mode; refused where it is compiled on its own",
    advice="compile the blocks rather than flex_attention alone",
)

ROWS = (AttentionOp(backend="flex", namespace="higher_order", name="flex_attention", layout="bhsd", dropout=None),)
