"""torch.nn.functional.scaled_dot_product_attention: the aten ops it can end in (torch 2.13).

`scaled_dot_product_attention` is composite and never reaches the dispatcher. The math fallback is composite too; only
it calls `_safe_softmax`, so a call of that op means that an attention was decomposed. Kernels draw random numbers only
if dropout_p > 0; the CPU kernel refuses dropout. `_flash_attention_forward_no_dropout_inplace` has no row, because it
writes its argument.
"""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops, Row

LIBRARY = Library(
    backend="sdpa",
    name="scaled_dot_product_attention",
    verdict=Verdict.SAVABLE,
    how="the aten op it ends in; the math kernel is refused",
)

_row = partial(AttentionOp, backend="sdpa", namespace="aten", dropout="dropout_p")


def _with_backward(name: str) -> AttentionOp:
    return _row(name=name, layout="bhsd", flops=Flops(backward=f"{name}_backward"))


ROWS = (
    _with_backward("_scaled_dot_product_flash_attention"),
    _with_backward("_scaled_dot_product_efficient_attention"),
    _with_backward("_scaled_dot_product_cudnn_attention"),
    _with_backward("_scaled_dot_product_fused_attention_overrideable"),
    _with_backward("_scaled_dot_product_flash_attention_for_cpu"),
    _row(name="_scaled_dot_product_attention_math_for_mps", layout="bhsd"),
    # The first three ops call these; libraries such as xformers call them directly.
    _row(
        name="_flash_attention_forward",
        layout="bshd",
        max_kv="max_k",
        flops=Flops(backward="_flash_attention_backward", offsets=("cum_seq_q", "cum_seq_k")),
    ),
    _row(
        name="_efficient_attention_forward",
        layout="bshd",
        max_kv="max_seqlen_k",
        flops=Flops(backward="_efficient_attention_backward", offsets=("cu_seqlens_q", "cu_seqlens_k")),
    ),
    _row(
        name="_cudnn_attention_forward",
        # Of these three, only the cuDNN op has the heads before the sequence.
        layout="bhsd",
        max_kv="max_k",
        flops=Flops(backward="_cudnn_attention_backward", offsets=("cum_seq_q", "cum_seq_k")),
    ),
    Row(namespace="aten", name="_safe_softmax", kind="decomposition"),
)
