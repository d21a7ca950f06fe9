"""Functions that run one kernel on CUDA and several on a CPU, simulated as the one kernel.

A plan needs no GPU: it simulates fake tensors on the CPU. There torch runs `rms_norm`, for instance, as nine ops with
copies in fp32, and autograd saves these copies. In the place of each such function `OneKernel` calls an op that has the
outputs and the saved tensors of CUDA's kernel.

torch decides this in several places: `_fused_rms_norm` has a CUDA kernel and a composite one (native_functions.yaml);
`dropout`, `softmax` and `scaled_dot_product_attention` ask for the device (aten/src/ATen/native: Dropout.cpp,
SoftMax.cpp, transformers/attention.cpp). tests/planning/test_fused_kernels.py reads torch's table of ops, and compares
what autograd records of all of `torch.nn.functional` with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fastac.engine import torch_private


class FusedRmsNorm(torch.autograd.Function):
    """Allocates and saves what aten's `_fused_rms_norm` does on CUDA (since pytorch#153666)."""

    generate_vmap_rule = True  # rms_norm may be called inside vmap

    @staticmethod
    def forward(values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None) -> torch.Tensor:
        """An output like the input."""
        return torch.empty_like(values, memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        """Save the input, the weight and one fp32 number for each norm."""
        values, shape, weight = inputs
        statistics = values.new_empty(values.shape[: values.dim() - len(shape)], dtype=torch.float32)
        ctx.save_for_backward(values, weight, statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input and the weight, if they need one."""
        values, weight, _ = ctx.saved_tensors
        of_values, _, of_weight = ctx.needs_input_grad
        return torch.empty_like(values) if of_values else None, None, torch.empty_like(weight) if of_weight else None


# The arguments of these functions have torch's names: models pass them by name. They return NotImplemented if the call
# is the same on a CPU, or if CUDA runs several kernels as well.


def rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """rms_norm is one kernel, unless the weight has another dtype."""
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    return FusedRmsNorm.apply(input, normalized_shape, weight)  # type: ignore[no-untyped-call]


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
    """Dropout is one kernel. Its mask has a byte for each number; a CPU's mask has the dtype of the input."""
    if inplace or not training or not 0 < p < 1:
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def softmax(input: torch.Tensor, dim: int | None = None, *others: Any, **named: Any) -> Any:  # noqa: A002
    """A softmax from fp16 to fp32 is one kernel, without a copy of the input in fp32."""
    if input.dtype is not torch.float16 or torch.float32 not in (named.get("dtype"), *others) or dim is None:
        return NotImplemented
    return torch_private.softmax_to_fp32(input, dim)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with dropout, or with values of another width, is the memory-efficient kernel. A CPU has none."""
    needed = dropout_p > 0 or query.shape[-1] != value.shape[-1]
    # The kernel reads 16 bytes at a time: both widths must be multiples of so many numbers.
    alignment = 16 // query.itemsize
    fits = query.dim() == 4 and not enable_gqa and query.itemsize <= 4
    if not (needed and fits) or query.shape[-1] % alignment or value.shape[-1] % alignment:
        return NotImplemented
    # torch turns a boolean mask into an additive one, and expands it over batch and heads, before it calls the kernel.
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype is torch.bool else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch_private.efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.rms_norm: rms_norm,
    torch.nn.functional.rms_norm: rms_norm,
    torch.nn.functional.dropout: dropout,
    torch.nn.functional.softmax: softmax,
    torch.softmax: softmax,
    torch.Tensor.softmax: softmax,
    torch.nn.functional.scaled_dot_product_attention: attention,
}
"""Function of torch -> a function that allocates what torch's does on CUDA."""


class OneKernel(TorchFunctionMode):
    """Calls `FUNCTIONS` in the place of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        output = FUNCTIONS[func](*args, **named) if func in FUNCTIONS else NotImplemented
        return func(*args, **named) if output is NotImplemented else output
