"""FastVideo (0.2.1), its kernels (fastvideo-kernel 0.3.5, vsa 0.0.4), and attention that it took from others.

Its wrappers of flash-attn are ops with their own backward, and call flash-attn's ops inside. Video sparse attention
(VSA) has one op per kernel; its compressed branch, over one key per block, runs as small ops and is recomputed. VMoBA
calls flash-attn 2. Sliding tile attention, and ops named inference, have no backward.
"""

from functools import partial

from fastac.backends.flash_attn_4 import LEAVE_UNCOMPILED, VISIBLE
from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops, OpaqueFunction

_library = partial(Library, distribution="fastvideo-kernel", verdict=Verdict.SAVABLE)
_opaque = partial(_library, verdict=Verdict.OPAQUE, advice=LEAVE_UNCOMPILED)

LIBRARIES = (
    _library(backend="fastvideo", name="FastVideo's flash-attn wrappers", distribution="fastvideo", how="its ops"),
    _library(backend="vsa", name="video sparse attention", how="its ops, with the chosen blocks"),
    _library(backend="fa2", name="VMoBA", how="flash-attn 2's op, twice per call, with the chosen blocks"),
    _opaque(backend="sla", name="sparse-linear attention (SLA)", how=VISIBLE),
    _opaque(
        backend="attn_qat",
        name="attention with quantization-aware training",
        how=f"{VISIBLE}, with all that its backward needs",
    ),
    _opaque(backend="bsa", name="block-sparse attention (LongCat)", distribution="fastvideo", how=VISIBLE),
)

_wrapper = partial(AttentionOp, backend="fastvideo", namespace="fastvideo", key="k", dropout=None)
_sparse = partial(AttentionOp, backend="vsa", layout="bhsd", key="k", dropout=None)
# fastvideo_kernel chooses blocks in a kernel that no op shows; vsa chooses by aten::topk.
_LISTS, _MAP = ("q2k_idx", "q2k_num"), ("block_map",)
_SIZES = "variable_block_sizes"
_chosen = partial(_sparse, namespace="fastvideo_kernel", selection=_LISTS, coarse=_SIZES)
_mapped = partial(_sparse, namespace="vsa", coarse=_SIZES)
_INFERENCE = "it is for inference and has no backward"
_inference = partial(_sparse, namespace="fastvideo_kernel", trains=False, note=_INFERENCE, flops=Flops(blocks=_MAP))

ROWS = (
    _wrapper(name="_flash_attn_default_forward"),
    _wrapper(
        # Its backward gives flash-attn no generator state, so with dropout its gradients are wrong anyway.
        name="_flash_attn_no_pad_forward",
        key="qkv",
        layout="bs3hd",
        dropout="dropout_p",
        # Query, key and value are one tensor, with one mask.
        flops=Flops(offsets=("key_padding_mask", "key_padding_mask")),
    ),
    _wrapper(
        name="_flash_attn_varlen_qk_no_pad_forward",
        key="key",
        dropout="dropout_p",
        flops=Flops(offsets=("query_padding_mask", "key_padding_mask")),
    ),
    # flash-attn 4 runs the backward past the dispatcher, so these two rows have no backward op to count.
    _wrapper(name="_flash_attn_cute_forward"),
    _wrapper(
        name="_flash_attn_cute_varlen_forward",
        layout="thd",
        max_kv="max_seqlen_k",
        flops=Flops(offsets=("cu_seqlens_q", "cu_seqlens_k")),
    ),
    _wrapper(name="_flash_attn_cute_fp4_forward", trains=False, note=_INFERENCE),
    _chosen(name="block_sparse_attn_triton", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_LISTS)),
    _chosen(
        name="block_sparse_attn_sm90",
        # The op for the H100 gets keys that are padded to whole blocks.
        key="k_padded",
        flops=Flops(backward="block_sparse_attn_backward_sm90", blocks=_LISTS),
    ),
    # Blackwell has a forward of its own, and the backward of the Triton kernels.
    _chosen(name="block_sparse_attn_sm100a", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_LISTS)),
    _mapped(name="block_sparse_attn_triton", flops=Flops(backward="block_sparse_attn_backward_triton", blocks=_MAP)),
    _mapped(
        name="block_sparse_attn_SM90",
        key="k_padded",
        flops=Flops(backward="block_sparse_attn_backward_SM90", blocks=_MAP),
    ),
    # These rows are for the error: a call in training names the reason, and not only an op that is unknown.
    _inference(name="block_sparse_attn_sm100a_inference", coarse=_SIZES, flops=Flops(blocks=_LISTS)),
    _inference(name="block_sparse_attn_sm100a_from_mask_inference"),
    _inference(name="h3_vsa_sm100a_from_mask_compat", namespace="fastvideo"),
)

_KERNELS = r"fastvideo_kernel\."
_function = partial(OpaqueFunction, layout="bhsd", dropout=None)

FUNCTIONS = (
    _function(
        # It runs on flash-attn 4's kernels, which no op shows.
        backend="vsa",
        module=_KERNELS + "block_sparse_attn_cute_fwd",
        name="_CuteAttentionQ128",
        key="k_bshd",
        layout="bshd",
        flops=Flops(blocks=_MAP),
    ),
    _function(
        # Its module is part of fastvideo-kernel, and of a package of its own. The Function gets the blocks that were
        # chosen before its call.
        backend="sla",
        module=_KERNELS + r"triton_kernels\.sla_triton|sparse_linear_attention\.kernel",
        name="_attention",
        flops=Flops(blocks=("k_block_id",)),
    ),
    # Its forward saves three more tensors of the size of the query, which are held beside the output.
    _function(backend="attn_qat", module=_KERNELS + r"triton_kernels\.attn_qat_train", name="_attention"),
    # FastVideo carries it inside its own package. It chooses its blocks inside the Function, so FLOPs are counted
    # as if it were dense.
    _function(
        backend="bsa", module=r"(\w+\.)*longcat_video\.block_sparse_attention\.bsa_interface", name="_attention_bsa"
    ),
)
