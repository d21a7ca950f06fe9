"""FLOPs of attention calls, from a row: for torch's FlopCounterMode, and for what AOT weighs recomputation with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fastac import registry, torch_internals
from fastac.registry import ResolvedOp
from fastac.rows import AttentionOp


def attention_flops(resolved: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """FLOPs of one attention forward: two products per query and key, of a multiplication and an addition each.

    2 x (batch x heads x queries) x keys x (head dim of query and key + head dim of value), as torch counts its own
    attention: a causal or other mask saves nothing, and of sequences that are packed each has the length of the
    longest. Sparse attention counts as if it were dense.
    """
    output = next(value for value in torch_internals.tree_leaves(outputs) if isinstance(value, torch.Tensor))
    row = resolved.row
    assert isinstance(row, AttentionOp)
    key = resolved.argument(row.key, args, kwargs)
    queries = output.numel() // output.shape[-1]  # of all heads and sequences
    return int(2 * queries * resolved.keys(args, kwargs) * (key.shape[-1] + output.shape[-1]))


def product_flops(args: Sequence[Any]) -> int:
    """FLOPs of the matrix product that ends a call's arguments: (..., rows, inner) by (..., inner, columns)."""
    left, right = args[-2:]
    return int(2 * left.numel() * right.shape[-1])


def register_formulas() -> list[str]:
    """Give every registered attention op of this process, for which torch has no FLOP formula, the one above.

    Returns the names of the ops that got one.
    """
    made = []
    for resolved in registry.present_ops():
        target = getattr(resolved.op, "overloadpacket", resolved.op)
        if resolved.is_attention and target not in flop_registry:
            register_flop_formula(target, get_raw=True)(_formula(resolved))
            made.append(resolved.name)
    return made


def _formula(resolved: ResolvedOp) -> Any:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return attention_flops(resolved, args, kwargs, out_val)

    return flops
