"""flash-attn 3, from flash-attn's `hopper` folder: both generations of its op. It has no dropout.

Up to 2.7.4 it was a pybind extension, which cannot be seen. Then came `flash_attn_3::fwd`, which may write three of its
arguments and is saved in calls without them; training never passes them. Since August 2025 the op is
`flash_attn_3::_flash_attn_forward`. In July 2025 that op was in flash-attn 2's namespace, where an argument tells them
apart.
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
    # One row serves dense and packed calls: both layouts count keys in the same dimension, and a packed call says
    # the longest length.
    max_kv="max_seqlen_k",
    dropout=None,
    flops=Flops(backward="_flash_attn_backward", offsets=("cu_seqlens_q", "cu_seqlens_k")),
)
_NAMESPACE = r"flash_attn_3|_flash_attn_?3_\w+"

ROWS = (
    _row(namespace=_NAMESPACE, name="fwd", flops=Flops(backward="bwd", offsets=("cu_seqlens_q", "cu_seqlens_k"))),
    _row(namespace=_NAMESPACE, name="_flash_attn_forward"),
    # July 2025: `qv` is an argument of flash-attn 3 only.
    _row(namespace="flash_attn", name="_flash_attn_forward", with_argument="qv"),
)
