"""CPU kernels for the aten attention ops that torch implements for other devices only: `kernels_on_cpu`.

So torch's real schemas and autograd formulas run on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastac.registry import find_op
from tests.backends.kernels_on_cpu import backward_kernel, forward_kernel

_FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention.quantized",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward",
    "_flash_attention_forward.quantized",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
FORWARD = [name for name in _FORWARD if find_op(f"aten::{name}")]
"""Those that this torch has: the quantized ones came with 2.11."""

BACKWARD = [name for one in FORWARD if find_op(f"aten::{(name := one.removesuffix('_forward') + '_backward')}")]

UNNAMED = {"_scaled_dot_product_attention_math_for_mps": ("out", "logsumexp")}
"""What ops return whose schema does not say."""


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> Iterator[None]:
    """For modules that import it."""
    with registered():
        yield


@contextmanager
def registered() -> Iterator[None]:
    """The ops above have CPU kernels inside. Forwards count themselves in `support.executions`, as `aten::<name>`."""
    library = torch.library.Library("aten", "IMPL")
    for name in FORWARD + BACKWARD:
        # Tokens before heads, when they are not packed: (tokens, heads, dim) with ends given.
        layout = "bshd" if name.startswith(("_flash", "_efficient")) else "bhsd"
        # To what statistics are padded; those of a packed batch have one row per sequence then.
        aligned = 32 if name.startswith("_efficient") else 0
        op = find_op(f"aten::{name}")
        if name in FORWARD:
            kernel = forward_kernel(f"aten::{name}", op, layout, UNNAMED.get(name, ()), aligned)
        else:
            kernel = backward_kernel(op, layout, aligned)
        library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()
