"""xFormers on any machine: its real Python layer and dispatcher, with CPU kernels of `kernels_on_cpu`.

Its custom ops run with their own bodies; the ops that these call get kernels. Its conditions on devices and dtypes are
widened. Import it before xFormers and diffusers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends import aten_on_cpu
from tests.backends.flash_on_cpu import flash_attn_3, substitute
from tests.backends.kernels_on_cpu import backward_kernel, forward_kernel

# C++ ops, with the schemas that they have in ROCm builds of xFormers (ck) and in fbgemm-gpu-genai 1.9.
SCHEMAS = (
    "xformers::efficient_attention_forward_ck(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, float dropout_p, bool compute_logsumexp, "
    "int custom_mask_type, float? scale, Tensor? seqlen_k, int? window_size, Tensor? block_tables, int? page_size) "
    "-> (Tensor, Tensor?, int, int)",
    "xformers::efficient_attention_backward_ck(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias, Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? seqlen_k, Tensor logsumexp, Tensor output, float dropout_p, int rng_seed, int rng_offset, "
    "int custom_mask_type, float? scale, int? window_size) -> (Tensor, Tensor, Tensor, Tensor)",
    "fbgemm::fmha_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seq_len_q=None, SymInt? max_seq_len_k=None, float? softmax_scale=None, bool causal=False, "
    "Tensor? seqlen_kv=None, Tensor? page_table=None, SymInt? seqlen_k=None, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, bool bottom_right=True) -> (Tensor, Tensor)",
    "fbgemm::fmha_bwd(Tensor dOutput, Tensor query, Tensor key, Tensor value, Tensor output, Tensor softmax_lse, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seq_len_q=None, SymInt? max_seq_len_k=None, "
    "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "bool bottom_right=True, bool deterministic=False) -> (Tensor, Tensor, Tensor)",
)
RETURNS = {
    "xformers::efficient_attention_forward_ck": ("out", "logsumexp", "seed", "offset"),
    "fbgemm::fmha_fwd": ("out", "logsumexp"),
}


_libraries: list[torch.library.Library] = []  # a Library takes its kernels along when it goes


def _define(schema: str) -> torch.library.Library:
    qualified, _, rest = schema.partition("(")
    namespace, name = qualified.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{name}({rest}")
    op = getattr(getattr(torch.ops, namespace), name).default
    if qualified in RETURNS:
        kernel = forward_kernel(qualified, op, "bshd", RETURNS[qualified])
    else:
        kernel = backward_kernel(op, "bshd")
    library.impl(name, functools.partial(_as_a_batch_of_one, kernel) if name == "fmha_fwd" else kernel, "CPU")
    return library


def _as_a_batch_of_one(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fbgemm's statistics of a packed batch."""
    output, statistics = kernel(*args, **kwargs)
    return output, statistics[None] if statistics.dim() == 2 else statistics


NAMES = {"q": "query", "k": "key", "v": "value", "out": "output", "dout": "dOutput"}
"""An argument of the Python functions -> of fbgemm's ops."""


def _fmha(op: Any, *, window_left: int, window_right: int, **given: Any) -> Any:
    renamed = {NAMES.get(name, name): value for name, value in given.items()}
    return op(**renamed, window_size_left=window_left, window_size_right=window_right)


@functools.cache
def xformers() -> ModuleType:
    """Import xformers.ops, with CPU kernels for its ops."""
    _libraries.extend(map(_define, SCHEMAS))
    flash_attn_3()
    place = ["fbgemm_gpu", "experimental", "gen_ai", "attention", "cutlass_blackwell_fmha"]
    for depth in range(len(place)):
        substitute(".".join(place[: depth + 1]))
    interface = substitute(".".join([*place, "cutlass_blackwell_fmha_interface"]))
    for name, op in (("forward", torch.ops.fbgemm.fmha_fwd), ("backward", torch.ops.fbgemm.fmha_bwd)):
        # In the real one, too, a call of the op.
        setattr(interface, f"_cutlass_blackwell_fmha_{name}", functools.partial(_fmha, op))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)  # torch's op, on a GPU
        patch.setitem(sys.modules, "flash_attn", None)  # whose extension it would call past the ops
        from xformers import ops
        from xformers.ops.fmha import flash, flash3
    for op in (flash._flash_fwd, flash._flash_bwd, flash3.mha_fwd, flash3.mha_bwd):
        op.register_kernel("cpu")(op._init_fn)
    return ops


@contextmanager
def registered() -> Iterator[None]:
    """xFormers takes tensors on the CPU inside; forwards count themselves by the op that does the arithmetic."""
    from xformers.ops.fmha import ck, common, cutlass, cutlass_blackwell, flash, flash3

    reasons_of = common.AttentionOpBase.not_supported_reasons.__func__

    def reasons(cls: type, inputs: Any) -> list[str]:
        return [reason for reason in reasons_of(cls, inputs) if not reason.startswith("bf16 is only supported")]

    with pytest.MonkeyPatch.context() as patch, aten_on_cpu.registered():
        patch.setattr(common.AttentionOpBase, "not_supported_reasons", classmethod(reasons))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        for module in (flash, flash3, cutlass, ck, cutlass_blackwell):
            for op in (module.FwOp, module.BwOp):
                patch.setattr(op, "SUPPORTED_DEVICES", {"cpu"})
                patch.setattr(op, "SUPPORTED_DTYPES", {torch.float32, torch.bfloat16})
        yield
