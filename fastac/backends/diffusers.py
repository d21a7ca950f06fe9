"""The verdict on each attention backend of diffusers (0.42), and which backends a model's modules use.

The table covers diffusers' `AttentionBackendName`. A module uses its processor's `_attention_backend`, else the
process-wide default. A processor without that attribute (CogVideoX, Mochi, Latte, ...) ignores the setting and calls
scaled_dot_product_attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fastac.backends.verdicts import BackendUse, Verdict
from fastac.registry import AttentionOp


class DiffusersBackend(NamedTuple):
    """The verdict on one backend of diffusers."""

    verdict: Verdict
    family: str
    """The `backend` of the rows that serve it; "" if no row can."""
    reason: str
    op: str = ""
    """The single op of these rows that it ends in."""


def _savable(family: str, reason: str, op: str = "") -> DiffusersBackend:
    return DiffusersBackend(Verdict.SAVABLE, family, reason, op)


_SAGE = DiffusersBackend(
    Verdict.NOT_TRAINABLE,
    "",
    "quantized kernels without a backward: gradients before the attention would silently be None",
)
_OTHER_DEVICE = DiffusersBackend(Verdict.UNKNOWN, "", "not checked: this hardware was not available")
_SDPA = "scaled_dot_product_attention"

BACKENDS: dict[str, DiffusersBackend] = {
    # Only a backend that forces one kernel names its op. _native_flash ends in different ops on CUDA and on a CPU.
    "native": _savable("sdpa", _SDPA),
    "_native_cudnn": _savable("sdpa", f"{_SDPA}, cuDNN kernel", "_scaled_dot_product_cudnn_attention"),
    "_native_efficient": _savable("sdpa", f"{_SDPA}, efficient kernel", "_scaled_dot_product_efficient_attention"),
    "_native_flash": _savable("sdpa", f"{_SDPA}, flash kernel"),
    "_native_math": DiffusersBackend(
        Verdict.DECOMPOSED, "", "the math kernel is many small ops, with no output to save"
    ),
    "_native_npu": _OTHER_DEVICE,
    "_native_xla": _OTHER_DEVICE,
    "flash": _savable("fa2", "flash-attn 2"),
    "flash_hub": _savable("fa2", "flash-attn 2 from the hub"),
    "flash_varlen": _savable("fa2", "flash-attn 2, packed"),
    "flash_varlen_hub": _savable("fa2", "flash-attn 2 from the hub, packed"),
    # It calls diffusers' own custom op, which has a fake kernel and no autograd formula (0.42.1).
    # The other backends of flash-attn 3 call the library's own function.
    "_flash_3": DiffusersBackend(Verdict.NOT_TRAINABLE, "", "its op has no autograd formula, so backward raises"),
    "_flash_varlen_3": _savable("fa3", "flash-attn 3, packed"),
    "_flash_3_hub": _savable("fa3", "flash-attn 3 from the hub"),
    "_flash_3_varlen_hub": _savable("fa3", "flash-attn 3 from the hub, packed"),
    "flash_4_hub": DiffusersBackend(
        Verdict.OPAQUE, "fa4", "its kernel is called past the dispatcher, from an autograd.Function"
    ),
    "aiter_fa2_hub": _OTHER_DEVICE,
    "flex": _savable("flex", "flex_attention; compiled, by fastac.compile"),
    "sage": _SAGE,
    "sage_hub": _SAGE,
    "sage_blackwell_hub": _SAGE,
    "sage_varlen": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda_sm90": _SAGE,
    "_sage_qk_int8_pv_fp16_cuda": _SAGE,
    "_sage_qk_int8_pv_fp16_triton": _SAGE,
    "xformers": _savable("xformers", "xFormers memory-efficient attention"),
}

# The table is asked at `enable`, for modules of diffusers. The row refuses calls that come from elsewhere.
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
    """The backend of modules without their own: DIFFUSERS_ATTN_BACKEND, or the last `set_attention_backend`."""
    # diffusers has no public way to ask for it (0.42).
    registry = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)
    if registry is None:
        # diffusers is not loaded, a thread imports it now, or it is older than 0.35, which has no setting.
        return "native"
    backend, _ = registry.get_active_backend()
    return str(getattr(backend, "value", backend))


def backend_uses(module: torch.nn.Module) -> Iterator[BackendUse]:
    """The backend of each diffusers attention module (each module with a processor) inside a module."""
    for name, inner in module.named_modules():
        processor = getattr(inner, "processor", None)
        if processor is None or not callable(processor):
            continue
        runs = type(processor).__name__
        if "LinearAttn" in runs:
            # SanaLinearAttnProcessor and its variants compute linear attention in matmuls: a backend has no effect.
            continue
        ignores = ""
        # The attribute tells processors that ask diffusers' dispatcher from those that call
        # scaled_dot_product_attention themselves, whatever the setting says.
        if hasattr(processor, "_attention_backend"):
            setting = processor._attention_backend
            backend = default_backend() if setting is None else str(getattr(setting, "value", setting))
        else:
            backend = "native"
            ignores = default_backend()
        row = BACKENDS.get(backend, _UNLISTED)
        yield BackendUse(name, backend, row.verdict, row.reason, row.family, row.op, processor=runs, ignores=ignores)
