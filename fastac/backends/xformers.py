"""xFormers (0.0.35): memory_efficient_attention and the ops it may end in.

Its cutlass kernel is torch's own `aten::_efficient_attention_forward`, which has a row in `sdpa`.
"""

from functools import partial

from fastac.rows import AttentionOp, Library, Verdict

LIBRARY = Library(
    backend="xformers",
    name="xFormers",
    distribution="xformers",
    verdict=Verdict.SAVABLE,
    how="its ops (flash, flash3, ck), torch's for cutlass",
)

_row = partial(AttentionOp, backend="xformers")

ROWS = (
    _row(namespace="xformers_flash", name="flash_fwd", max_kv="max_seqlen_k", dropout="p"),
    _row(namespace="xformers_flash3", name="flash_fwd", max_kv="max_seqlen_k", dropout="p"),
    _row(namespace="xformers", name="efficient_attention_forward_ck", dropout="dropout_p"),
)
