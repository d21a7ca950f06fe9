"""flash-attn 3, of flash-attn's `hopper` folder: both generations of its op. It has no dropout.

Until 2.7.4 a pybind extension, which nobody sees. Then `flash_attn_3::fwd`, which may write three of its arguments
and is saved in calls without them; training never passes them. Since August 2025 `flash_attn_3::_flash_attn_forward`.
The month between, July 2025, that op stood in flash-attn 2's namespace, where its arguments tell it.
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(
    backend="fa3",
    name="flash-attn 3",
    distribution="flash_attn_3",
    verdict=Verdict.SAVABLE,
    how="its op; builds before 2.8 have none",
)

_row = partial(
    AttentionOp,
    backend="fa3",
    key="k",
    max_kv="max_seqlen_k",
    dropout=None,
    flops=Flops(backward="_flash_attn_backward", offsets=("cu_seqlens_q", "cu_seqlens_k")),
)
_NAMESPACE = r"flash_attn_3|_flash_attn_?3_\w+"

ROWS = (
    _row(namespace=_NAMESPACE, name="fwd", flops=Flops(backward="bwd", offsets=("cu_seqlens_q", "cu_seqlens_k"))),
    _row(namespace=_NAMESPACE, name="_flash_attn_forward"),
    _row(namespace="flash_attn", name="_flash_attn_forward", with_argument="qv"),
)
