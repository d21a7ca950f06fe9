"""FastVideo (0.2.1) and its kernels (fastvideo-kernel 0.3.5, vsa 0.0.4), and attention that it took from others.

Its wrappers of flash-attn are ops with a backward of their own, that call flash-attn's inside. Video sparse attention
(VSA) is an op per kernel; its compressed branch, over one key per block, is small ops and recomputed. VMoBA calls
flash-attn 2. Sliding tile attention and what is named inference have no backward.
"""

from functools import partial

from fastac.registry import AttentionOp, Flops, Library, OpaqueFunction, Verdict

LIBRARIES = (
    Library(
        backend="fastvideo",
        name="FastVideo's flash-attn wrappers",
        distribution="fastvideo",
        verdict=Verdict.SAVABLE,
        how="its ops",
    ),
    Library(
        backend="vsa",
        name="video sparse attention",
        distribution="fastvideo-kernel",
        verdict=Verdict.SAVABLE,
        how="its ops, with the chosen blocks",
    ),
    Library(
        backend="fa2",
        name="VMoBA",
        distribution="fastvideo-kernel",
        verdict=Verdict.SAVABLE,
        how="flash-attn 2's op, twice per call, with the chosen blocks",
    ),
    Library(
        backend="sla",
        name="sparse-linear attention (SLA)",
        distribution="fastvideo-kernel",
        verdict=Verdict.OPAQUE,
        how="made visible when it is loaded",
        advice="leave blocks that use it uncompiled: in compiled code it is recomputed",
    ),
    Library(
        backend="attn_qat",
        name="attention with quantization-aware training",
        distribution="fastvideo-kernel",
        verdict=Verdict.OPAQUE,
        how="made visible when it is loaded, with what its backward needs besides",
        advice="leave blocks that use it uncompiled: in compiled code it is recomputed",
    ),
    Library(
        backend="bsa",
        name="block-sparse attention (LongCat)",
        distribution="fastvideo",
        verdict=Verdict.OPAQUE,
        how="made visible when it is loaded",
        advice="leave blocks that use it uncompiled: in compiled code it is recomputed",
    ),
)

_wrapper = partial(AttentionOp, backend="fastvideo", namespace="fastvideo", key="k", dropout=None)
_sparse = partial(AttentionOp, backend="vsa", layout="bhsd", key="k", dropout=None, coarse="variable_block_sizes")
# Chosen in a kernel of its own, that no op shows. vsa chooses by aten::topk.
_LISTS, _MAP = ("q2k_idx", "q2k_num"), ("block_map",)
_chosen = partial(_sparse, namespace="fastvideo_kernel", selection=_LISTS)
_mapped = partial(_sparse, namespace="vsa")
_inference = partial(AttentionOp, key="k", dropout=None, trains=False, note="it is for inference and has no backward")
_sparse_inference = partial(_inference, backend="vsa", layout="bhsd", flops=Flops(blocks=_MAP))

ROWS = (
    _wrapper(name="_flash_attn_default_forward"),
    _wrapper(
        name="_flash_attn_no_pad_forward",
        key="qkv",
        layout="bs3hd",
        dropout="dropout_p",
        flops=Flops(offsets=("key_padding_mask", "key_padding_mask")),
    ),
    _wrapper(
        name="_flash_attn_varlen_qk_no_pad_forward",
        key="key",
        dropout="dropout_p",
        flops=Flops(offsets=("query_padding_mask", "key_padding_mask")),
    ),
    _wrapper(name="_flash_attn_cute_forward"),
    _wrapper(
        name="_flash_attn_cute_varlen_forward",
        layout="thd",
        max_kv="max_seqlen_k",
        flops=Flops(offsets=("cu_seqlens_q", "cu_seqlens_k")),
    ),
    _chosen(name="block_sparse_attn_triton", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_LISTS)),
    _chosen(
        name="block_sparse_attn_sm90",
        key="k_padded",
        flops=Flops(backward="block_sparse_attn_backward_sm90", blocks=_LISTS),
    ),
    _chosen(name="block_sparse_attn_sm100a", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_LISTS)),
    _mapped(name="block_sparse_attn_triton", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_MAP)),
    _mapped(
        name="block_sparse_attn_SM90",
        key="k_padded",
        flops=Flops(backward="block_sparse_attn_backward_SM90", blocks=_MAP),
    ),
    _sparse_inference(
        namespace="fastvideo_kernel",
        name="block_sparse_attn_sm100a_inference",
        coarse="variable_block_sizes",
        flops=Flops(blocks=_LISTS),
    ),
    _sparse_inference(namespace="fastvideo_kernel", name="block_sparse_attn_sm100a_from_mask_inference"),
    _sparse_inference(namespace="fastvideo", name="h3_vsa_sm100a_from_mask_compat"),
    _inference(backend="fastvideo", namespace="fastvideo", name="_flash_attn_cute_fp4_forward"),
)

FUNCTIONS = (
    OpaqueFunction(
        backend="vsa",
        module=r"fastvideo_kernel\.block_sparse_attn_cute_fwd",
        name="_CuteAttentionQ128",
        key="k_bshd",
        dropout=None,
        flops=Flops(blocks=_MAP),
    ),
    OpaqueFunction(
        backend="sla",
        module=r"fastvideo_kernel\.triton_kernels\.sla_triton|sparse_linear_attention\.kernel",
        name="_attention",
        layout="bhsd",
        dropout=None,
        flops=Flops(blocks=("k_block_id",)),
    ),
    OpaqueFunction(
        backend="attn_qat",
        module=r"fastvideo_kernel\.triton_kernels\.attn_qat_train",
        name="_attention",
        layout="bhsd",
        dropout=None,
    ),
    OpaqueFunction(
        backend="bsa",
        module=r"(\w+\.)*longcat_video\.block_sparse_attention\.bsa_interface",
        name="_attention_bsa",
        layout="bhsd",
        dropout=None,
    ),
)
