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

# Op -> where tokens and heads are in its tensors, when they are not packed: (tokens, heads, dim) with ends given.
_FORWARD = {
    "_scaled_dot_product_flash_attention": "bhsd",
    "_scaled_dot_product_flash_attention.quantized": "bhsd",
    "_scaled_dot_product_efficient_attention": "bhsd",
    "_scaled_dot_product_cudnn_attention": "bhsd",
    "_scaled_dot_product_fused_attention_overrideable": "bhsd",
    "_scaled_dot_product_attention_math_for_mps": "bhsd",
    "_flash_attention_forward": "bshd",
    "_flash_attention_forward.quantized": "bshd",
    "_efficient_attention_forward": "bshd",
    "_cudnn_attention_forward": "bhsd",
}
FORWARD = {name: layout for name, layout in _FORWARD.items() if find_op(f"aten::{name}")}
"""Those that this torch has: the quantized ones came with 2.11."""

BACKWARD = {
    "_scaled_dot_product_flash_attention_backward": "bhsd",
    "_scaled_dot_product_efficient_attention_backward": "bhsd",
    "_scaled_dot_product_cudnn_attention_backward": "bhsd",
    "_scaled_dot_product_fused_attention_overrideable_backward": "bhsd",
    "_flash_attention_backward": "bshd",
    "_efficient_attention_backward": "bshd",
    "_cudnn_attention_backward": "bhsd",
}

UNNAMED = {"_scaled_dot_product_attention_math_for_mps": ("out", "logsumexp")}
"""What ops return whose schema does not say."""

ALIGNED = {"_efficient_attention_forward": 32, "_efficient_attention_backward": 32}
"""To what statistics are padded; those of a packed batch have one row per sequence then."""


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> Iterator[None]:
    """For modules that import it."""
    with registered():
        yield


@contextmanager
def registered() -> Iterator[None]:
    """The ops above have CPU kernels inside. Forwards count themselves in `support.executions`, as `aten::<name>`."""
    library = torch.library.Library("aten", "IMPL")
    for name, layout in (FORWARD | BACKWARD).items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aligned = ALIGNED.get(name, 0)
        if name in FORWARD:
            kernel = forward_kernel(f"aten::{name}", op, layout, UNNAMED.get(name, ()), aligned)
        else:
            kernel = backward_kernel(op, layout, aligned)
        library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()
