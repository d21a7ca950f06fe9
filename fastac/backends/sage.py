"""SageAttention (2.2) and sage_attn3: quantized kernels for inference. Gradients behind them would silently be None.

Its ops write their output argument and have no autograd formula. SageAttention 1 and sage_attn3 have no ops at all.
FLOPs are counted for (batch, heads, sequence, dim). The other layout, chosen by `tensor_layout`, is counted wrong.
"""

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp

_NO_BACKWARD = "quantized kernels without a backward: gradients before the attention would silently be None"

LIBRARY = Library(
    backend="sage",
    name="SageAttention, sage_attn3",
    distribution="sageattention",
    verdict=Verdict.NOT_TRAINABLE,
    how=_NO_BACKWARD,
    advice="train with another backend",
)

_OPS = (
    "qk_int8_sv_f16_accum_f16_attn",
    "qk_int8_sv_f16_accum_f32_attn",
    "qk_int8_sv_f16_accum_f16_attn_inst_buf",
    "qk_int8_sv_f16_accum_f16_fuse_v_mean_attn",
    "qk_int8_sv_f8_accum_f32_attn_inst_buf",
    "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn",
    "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf",
    "qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf",
    "qk_int8_sv_f8_accum_f32_fuse_v_scale_fuse_v_mean_attn",
)

ROWS = tuple(
    AttentionOp(
        backend="sage",
        # Each generation of GPUs has an extension of its own, and each build from the hub its own namespace.
        namespace=r"sageattention(_sm\d+)?|_sage_?attention\w*",
        name=name,
        layout="bhsd",
        dropout=None,
        # With these kernels 40 of the 69 parameters of a Wan model got no gradient, and torch raised no error.
        trains=False,
        note=_NO_BACKWARD,
    )
    for name in _OPS
)
