"""The kinds of attention in the blocks of the property tests, and what the blocks note.

A block notes each attention call of its Python code, in forward and in recompute. Less the calls that the policy saves
in recompute, that is how often the kernels have to run: no test asks fastac for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support

WIDTH, HEADS = 8, 2

Tensor = torch.Tensor
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(block, query, key, value), each (batch, heads, sequence, dim) -> output like query."""


class AttentionCall(NamedTuple):
    """One call of the block at a place in the model, over so many keys. recompute: not in a model's forward."""

    place: int
    keys: int
    recompute: bool


class Observed:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.in_forward = False
        self.inner_regions = False  # blocks checkpoint parts of themselves
        self.raised: BaseException | None = None  # the last UserError


observed = Observed()


_tests_op = functools.cache(support.custom_attention)


@functools.cache
def _visible_function() -> type[torch.autograd.Function]:
    """An autograd.Function over a kernel that the dispatcher does not see, made visible."""

    class RandomAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            support.executions["visible"] += 1
            with torch.autocast("cpu", enabled=False):
                output, statistics = support.attention_math(query, key, value)
            ctx.save_for_backward(query, key, value, output, statistics)
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    fastac.make_visible(RandomAttention, layout="bhsd", dropout=None)
    return RandomAttention


def _mask(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


def _sparse(block: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chosen = key.float().mean(dim=(0, 1, 3)).topk(key.shape[-2] // 2).indices
    chosen = chosen.repeat(3)[: key.shape[-2]]  # as many as there are, so that the number of keys is known
    return _tests_op("random_plain")(query, key[:, :, chosen], value[:, :, chosen])


def _chunked(block: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chunks = [F.scaled_dot_product_attention(chunk, key, value) for chunk in query.chunk(2, dim=-2)]
    block.note(key, len(chunks) - 1)
    return torch.cat(chunks, dim=-2)


def _math(block: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


def _inner(checkpoint: Callable[..., Any], block: Any, *tensors: Tensor) -> Tensor:

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query.sin(), key, value) * 0.5

    return checkpoint(attend, *tensors) if observed.inner_regions else attend(*tensors)


SUPPORTED: dict[str, Attend] = {
    "sdpa": lambda block, q, k, v: F.scaled_dot_product_attention(q, k, v),
    "mask": lambda block, q, k, v: F.scaled_dot_product_attention(q, k, v, _mask(q, k)),
    "grouped": lambda block, q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "custom": lambda block, q, k, v: _tests_op("random_plain")(q, k, v),
    "drawing": lambda block, q, k, v: _tests_op("random_drawing", "dropout", "dropout_p")(q, k, v, 0.3),
    "visible": lambda block, q, k, v: _visible_function().apply(q, k, v),
    "chunked": _chunked,
    "sparse": _sparse,
    "inner region": functools.partial(_inner, fastac.checkpoint),
}

REFUSED: dict[str, Attend] = {
    "written out": lambda block, q, k, v: (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v,
    "math": _math,
    "inner checkpoint": functools.partial(_inner, functools.partial(torch_checkpoint, use_reentrant=False)),
}
"""Attention that cannot be saved."""

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "scaled": lambda output: output.mul_(0.5),
    "rectified": lambda output: output.relu_(),
    "through a view": lambda output: output.transpose(1, 2)[0].add_(1),
}
"""In-place changes of an attention output: legal where autograd does not need it."""
