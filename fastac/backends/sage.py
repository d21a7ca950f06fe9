"""SageAttention (2.2) and sage_attn3: quantized kernels for inference. Gradients behind them would silently be None.

Its ops write their output argument and have no autograd formula. SageAttention 1 and sage_attn3 have no ops at all.
FLOPs are counted for (batch, heads, sequence, dim); its other layout, which only `tensor_layout` tells, counts wrong.
"""

from functools import partial

from fastac.registry import AttentionOp, Library, Verdict

LIBRARY = Library(
    backend="sage",
    name="SageAttention, sage_attn3",
    distribution="sageattention",
    verdict=Verdict.NOT_TRAINABLE,
    how="no backward: gradients before the attention would silently be None",
    advice="train with another backend",
)

_row = partial(
    AttentionOp,
    backend="sage",
    namespace=r"sageattention(_sm\d+)?|_sage_?attention\w*",
    layout="bhsd",
    dropout=None,
    trains=False,
    note="quantized kernels without a backward",
)

ROWS = (
    _row(name="qk_int8_sv_f16_accum_f16_attn"),
    _row(name="qk_int8_sv_f16_accum_f32_attn"),
    _row(name="qk_int8_sv_f16_accum_f16_attn_inst_buf"),
    _row(name="qk_int8_sv_f16_accum_f16_fuse_v_mean_attn"),
    _row(name="qk_int8_sv_f8_accum_f32_attn_inst_buf"),
    _row(name="qk_int8_sv_f8_accum_f32_fuse_v_scale_attn"),
    _row(name="qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"),
    _row(name="qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf"),
    _row(name="qk_int8_sv_f8_accum_f32_fuse_v_scale_fuse_v_mean_attn"),
)
