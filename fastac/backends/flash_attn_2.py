"""flash-attn 2 (2.8.3): two ops, under `flash_attn` or the namespace of a hub build. All entry points end in them.

Versions before 2.7 have no ops: they call their extension without the dispatcher.
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(backend="fa2", name="flash-attn 2", distribution="flash-attn", verdict=Verdict.SAVABLE, how="its op")

_row = partial(
    AttentionOp,
    backend="fa2",
    # Builds from the Hugging Face hub have namespaces of their own, such as _flash_attn2_a005f70.
    namespace=r"flash_attn|_flash_attn2?_\w+",
    key="k",
    dropout="dropout_p",
    # flash-attn 3 of July 2025 has an op of the same name in this namespace, without dropout.
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
