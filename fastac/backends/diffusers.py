"""What fastac can do for each attention backend that diffusers can be set to (diffusers 0.42).

A table over diffusers' `AttentionBackendName`, and the reading of which of them a model's modules use. A module uses
its processor's `_attention_backend`, else the process-wide default; a processor without that attribute (CogVideoX,
Mochi, Latte, ...) ignores the setting and calls scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fastac.registry import AttentionOp, BackendUse, Verdict


class DiffusersBackend(NamedTuple):
    """family: the backend of the rows that serve it, "" where no row can; op: the one op of these that it ends in."""

    verdict: Verdict
    family: str
    reason: str
    op: str = ""


_SAGE = "quantized kernels without a backward: gradients before the attention would silently be None"
_NO_BACKWARD = "its op has no autograd formula, so backward raises"
_OPAQUE = "its kernel is called past the dispatcher, from an autograd.Function"
_OTHER_DEVICE = "not checked: this hardware was not available"

BACKENDS: dict[str, DiffusersBackend] = {
    "native": DiffusersBackend(Verdict.SAVABLE, "sdpa", "scaled_dot_product_attention"),
    "_native_cudnn": DiffusersBackend(
        Verdict.SAVABLE,
        "sdpa",
        "scaled_dot_product_attention, cuDNN kernel",
        op="_scaled_dot_product_cudnn_attention",
    ),
    "_native_efficient": DiffusersBackend(
        Verdict.SAVABLE,
        "sdpa",
        "scaled_dot_product_attention, efficient kernel",
        op="_scaled_dot_product_efficient_attention",
    ),
    "_native_flash": DiffusersBackend(Verdict.SAVABLE, "sdpa", "scaled_dot_product_attention, flash kernel"),
    "_native_math": DiffusersBackend(
        Verdict.DECOMPOSED, "", "the math kernel is many small ops, with no output to save"
    ),
    "_native_npu": DiffusersBackend(Verdict.UNKNOWN, "", _OTHER_DEVICE),
    "_native_xla": DiffusersBackend(Verdict.UNKNOWN, "", _OTHER_DEVICE),
    "flash": DiffusersBackend(Verdict.SAVABLE, "fa2", "flash-attn 2"),
    "flash_hub": DiffusersBackend(Verdict.SAVABLE, "fa2", "flash-attn 2 from the hub"),
    "flash_varlen": DiffusersBackend(Verdict.SAVABLE, "fa2", "flash-attn 2, packed"),
    "flash_varlen_hub": DiffusersBackend(Verdict.SAVABLE, "fa2", "flash-attn 2 from the hub, packed"),
    "_flash_3": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _NO_BACKWARD),
    "_flash_varlen_3": DiffusersBackend(Verdict.SAVABLE, "fa3", "flash-attn 3, packed"),
    "_flash_3_hub": DiffusersBackend(Verdict.SAVABLE, "fa3", "flash-attn 3 from the hub"),
    "_flash_3_varlen_hub": DiffusersBackend(Verdict.SAVABLE, "fa3", "flash-attn 3 from the hub, packed"),
    "flash_4_hub": DiffusersBackend(Verdict.OPAQUE, "fa4", _OPAQUE),
    "aiter_fa2_hub": DiffusersBackend(Verdict.UNKNOWN, "", _OTHER_DEVICE),
    "flex": DiffusersBackend(Verdict.SAVABLE, "flex", "flex_attention; compiled, by fastac.compile"),
    "sage": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "sage_hub": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "sage_blackwell_hub": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "sage_varlen": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "_sage_qk_int8_pv_fp8_cuda": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "_sage_qk_int8_pv_fp8_cuda_sm90": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "_sage_qk_int8_pv_fp16_cuda": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "_sage_qk_int8_pv_fp16_triton": DiffusersBackend(Verdict.NOT_TRAINABLE, "", _SAGE),
    "xformers": DiffusersBackend(Verdict.SAVABLE, "xformers", "xFormers memory-efficient attention"),
}

ROWS = (
    AttentionOp(
        backend="diffusers",
        namespace="_diffusers_flash_attn_3",
        name="_flash_attn_forward",
        key="k",
        dropout=None,
        trains=False,
        note="diffusers' wrapper of flash-attn 3 has no autograd formula, so backward raises",
    ),
)

_UNLISTED = DiffusersBackend(Verdict.UNKNOWN, "", "not in fastac's table: diffusers added it later")


def default_backend() -> str:
    """The backend of modules that name none: DIFFUSERS_ATTN_BACKEND, or the last `set_attention_backend`."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))


def backend_uses(module: torch.nn.Module) -> Iterator[BackendUse]:
    """The backend of every diffusers attention module inside a module (every module that has a processor)."""
    for name, inner in module.named_modules():
        processor = getattr(inner, "processor", None)
        if processor is None or not callable(processor):
            continue
        runs = type(processor).__name__
        if "LinearAttn" in runs:
            continue  # linear attention has no kernel, so no backend
        ignores = ""
        if hasattr(processor, "_attention_backend"):
            own = processor._attention_backend
            backend = default_backend() if own is None else str(getattr(own, "value", own))
        else:
            backend = "native"
            ignores = default_backend()
        found = BACKENDS.get(backend, _UNLISTED)
        known = (found.verdict, found.reason, found.family, found.op)
        yield BackendUse(name, backend, *known, processor=runs, ignores=ignores)
