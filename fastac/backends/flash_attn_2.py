"""flash-attn 2 (2.8.3): two ops, under `flash_attn` or a hub build's own namespace. All entry points end in them.

Older versions (before torch custom ops, 2.7) call their extension past the dispatcher.
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(
    backend="fa2",
    name="flash-attn 2",
    distribution="flash-attn",
    verdict=Verdict.SAVABLE,
    how="its op",
)

_row = partial(
    AttentionOp,
    backend="fa2",
    namespace=r"flash_attn|_flash_attn2?_\w+",
    key="k",
    dropout="dropout_p",
    with_argument="dropout_p",
)

ROWS = (
    _row(name="_flash_attn_forward", flops=Flops(backward="_flash_attn_backward")),
    _row(
        name="_flash_attn_varlen_forward",
        layout="thd",
        max_kv="max_seqlen_k",
        flops=Flops(backward="_flash_attn_varlen_backward", offsets=("cu_seqlens_q", "cu_seqlens_k")),
    ),
)
