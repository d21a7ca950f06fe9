"""The verdict on each attention backend of diffusers (0.42), and on those that a model's modules use.

The table covers diffusers' `AttentionBackendName`. A module uses its processor's `_attention_backend`, else the
process-wide default. A processor without that attribute (CogVideoX, Mochi, Latte, ...) ignores the setting and calls
scaled_dot_product_attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from fastac import registry
from fastac.backends import sage
from fastac.backends.verdicts import Verdict
from fastac.engine import torch_private
from fastac.engine.blocks import is_inside
from fastac.errors import UnsupportedBackendError, class_name
from fastac.policy import BlockPolicies, Policy
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


# The table is asked at `enable`, for modules of diffusers. The row refuses calls that come from elsewhere.
ROWS = (
    AttentionOp(
        backend="diffusers",
        namespace="_diffusers_flash_attn_3",
        name="_flash_attn_forward",
        key="k",
        dropout=None,
        trains=False,
        # diffusers' own custom op (0.42.1). The other backends of flash-attn 3 call the library's own function.
        note="diffusers' wrapper of flash-attn 3 has no autograd formula, so backward raises",
    ),
)

_SAGE = DiffusersBackend(Verdict.NOT_TRAINABLE, "", sage.LIBRARY.how)
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
    "_flash_3": DiffusersBackend(Verdict.NOT_TRAINABLE, "", ROWS[0].note),
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

_UNLISTED = DiffusersBackend(Verdict.UNKNOWN, "", "not in fastac's table: diffusers added it later")


class BackendUse(NamedTuple):
    """The backend that one attention module uses."""

    module: str
    processor: str
    """The class that runs it."""
    backend: str
    found: DiffusersBackend
    """The verdict on it."""
    ignored: str
    """The backend that is set and has no effect on the module; "" if none is."""


def default_backend() -> str:
    """The backend of modules without their own: DIFFUSERS_ATTN_BACKEND, or the last `set_attention_backend`."""
    # diffusers has no public way to ask for it (0.42).
    theirs = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)
    if theirs is None:
        # diffusers is not loaded, a thread imports it now, or it is older than 0.35, which has no setting.
        return "native"
    backend, _ = theirs.get_active_backend()
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
        # The attribute tells processors that ask diffusers' dispatcher from those that call
        # scaled_dot_product_attention themselves, whatever the setting says.
        if hasattr(processor, "_attention_backend"):
            setting = processor._attention_backend
            backend = default_backend() if setting is None else str(getattr(setting, "value", setting))
            yield BackendUse(name, runs, backend, BACKENDS.get(backend, _UNLISTED), ignored="")
        else:
            yield BackendUse(name, runs, "native", BACKENDS["native"], ignored=default_backend())


def check_backends(
    model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], policy: Policy | BlockPolicies
) -> None:
    """Raise UnsupportedBackendError if an attention module uses a backend that the policy cannot save."""
    # A policy that saves nothing runs attention again, so it takes any kernel that trains.
    for use in backend_uses(model):
        found, saves = use.found, policy.is_selective
        if isinstance(policy, BlockPolicies):
            # An attention module outside all blocks is never recomputed, whatever the policies say.
            around = [policy.of(block) for name, block in blocks.items() if is_inside(use.module, name)]
            saves = bool(around and around[0] and around[0].is_selective)
        # Such a backend is refused under "full" as well: recompute gives no backward to a kernel that has none.
        if found.verdict is Verdict.NOT_TRAINABLE or (saves and not found.family):
            reason = f"is {found.verdict.value.replace('_', ' ')}: {found.reason}"
        # The table says what a backend can do. Whether its op is loaded and has a kernel depends on this process.
        elif saves and (missing := unavailable(found)) is not None:
            reason = f"cannot be saved here: {missing}"
        else:
            continue
        where = f"{class_name(model)}.{use.module}" if use.module else class_name(model)
        way_out = "" if found.verdict is Verdict.NOT_TRAINABLE else ', or policy="full"'
        raise UnsupportedBackendError(
            f"{policy}: backend {use.backend!r} at {where} {reason}. "
            f'Use transformer.set_attention_backend("native"){way_out}; `fastac backends` lists what can be saved here.'
        )


def unavailable(backend: DiffusersBackend) -> str | None:
    """Why no attention op of a backend can run on this machine; None if one can."""
    ops = [op for op in registry.present_ops() if isinstance(op.row, AttentionOp) and op.row.backend == backend.family]
    ops = [op for op in ops if op.row.name == backend.op] or ops
    if not ops:
        return f"no op of {backend.family} is loaded in this process: its library is not installed, or was not imported"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # CompositeExplicitAutograd: a kernel for every device, as custom ops have that are written in Python.
    keys = ["CPU", "CompositeExplicitAutograd"] + ([accelerator.type.upper()] if accelerator is not None else [])
    if not any(torch_private.has_kernel(op.qualified_name, key) for op in ops for key in keys):
        device = "the CPU" if accelerator is None else f"the CPU or {accelerator.type}"
        return f"{ops[0].name} has no kernel for {device}, which is all this machine has"
    return None


def ignored_backends(model: torch.nn.Module, blocks: Iterable[str]) -> list[str]:
    """A sentence for each attention backend that is set but has no effect on some attention of the model's blocks."""
    counts: dict[tuple[str, str], int] = {}
    names = tuple(blocks)
    for use in backend_uses(model):
        # Nothing is lost if the setting that is ignored is "native": the module calls the same function by itself.
        if use.ignored not in ("", use.backend) and any(is_inside(use.module, name) for name in names):
            counts[use.ignored, use.processor] = counts.get((use.ignored, use.processor), 0) + 1
    return [
        f"backend {backend!r} has no effect on {count} attention modules: {processor} calls "
        f"scaled_dot_product_attention itself"
        for (backend, processor), count in counts.items()
    ]
