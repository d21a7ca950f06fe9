"""xFormers (0.0.35): memory_efficient_attention and the ops it may end in.

Its cutlass kernel is torch's own `aten::_efficient_attention_forward`, which has a row in `sdpa`; the kernel for
Blackwell is an op of fbgemm-gpu-genai. Its split-KV kernel in Triton, for inference with few queries, is not an op and
cannot be seen.
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(
    backend="xformers",
    name="xFormers",
    distribution="xformers",
    verdict=Verdict.SAVABLE,
    how="its ops (flash, flash3, ck), torch's for cutlass, fbgemm's for Blackwell",
)

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
_row = partial(AttentionOp, backend="xformers")
_flash = partial(_row, name="flash_fwd", max_kv="max_seqlen_k", flops=Flops(backward="flash_bwd", offsets=_OFFSETS))

ROWS = (
    _flash(namespace="xformers_flash", dropout="p"),
    # The op has an argument `p` and ignores it: flash-attn 3 has no dropout.
    _flash(namespace="xformers_flash3", dropout=None),
    # It does not get the longest sequence of a packed batch: there the keys of all sequences count.
    _row(
        namespace="xformers",
        name="efficient_attention_forward_ck",
        dropout="dropout_p",
        flops=Flops(backward="efficient_attention_backward_ck", offsets=("seqstart_q", "seqstart_k")),
    ),
    _row(
        namespace="fbgemm",
        name="fmha_fwd",
        max_kv="max_seq_len_k",
        dropout=None,
        flops=Flops(backward="fmha_bwd", offsets=_OFFSETS),
    ),
    _row(
        # This namespace has no s at its end.
        namespace="xformer",
        name="memory_efficient_attention_forward",
        key="k",
        dropout=None,
        trains=False,
        note="it is only the forward; call xformers.ops.memory_efficient_attention",
    ),
)
