"""torch.nn.attention.flex_attention: a higher-order op in eager mode. NABLA is such a call, with a block mask.

Where inductor compiles it, alone or in a block, no call is left to see, and the region is refused; in a model that is
compiled as a whole, checkpointing is in the graph, and saves it. A tensor that requires grad and that a `score_mod`
uses gets a wrong gradient in eager mode under any checkpointing, torch's own as well (torch 2.13).
"""

from functools import partial

from fastac.rows import AttentionOp, Library, Verdict

LIBRARY = Library(
    backend="flex",
    name="flex_attention, NABLA",
    verdict=Verdict.SAVABLE,
    how="its higher-order op in eager mode; refused where it is compiled alone or in a block",
    advice="compile the whole model rather than flex_attention or the blocks",
)

_row = partial(AttentionOp, backend="flex", name="flex_attention", layout="bhsd", dropout=None)

ROWS = (_row(namespace="higher_order"), _row(namespace="fastac_compiled"))
