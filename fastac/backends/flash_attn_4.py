"""flash-attn 4 (4.0.0b36): CuTe kernels called from two autograd.Functions, made visible when the library is loaded."""

from functools import partial

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import Flops, OpaqueFunction

VISIBLE = "made visible when it is loaded"
LEAVE_UNCOMPILED = "leave blocks that use it uncompiled: in compiled code it is recomputed"
"""How a library of autograd.Functions is saved, and what to do."""

LIBRARY = Library(
    backend="fa4",
    name="flash-attn 4",
    distribution="flash-attn-4",
    verdict=Verdict.OPAQUE,
    how=VISIBLE,
    advice=LEAVE_UNCOMPILED,
)

# The package itself, and hub builds, which have their own module.
_function = partial(
    OpaqueFunction, backend="fa4", module=r"(flash_attn|_?flash_attn_?4\w*)(\.\w+)*\.interface", dropout=None
)

FUNCTIONS = (
    _function(name="FlashAttnFunc"),
    _function(
        name="FlashAttnVarlenFunc",
        layout="thd",
        # A call may leave this out. Then the keys of all sequences count together.
        max_kv="max_seqlen_k",
        flops=Flops(offsets=("cu_seqlens_q", "cu_seqlens_k")),
    ),
)
