"""FLOPs of attention, forward and backward, for torch's FlopCounterMode and for AOT's partitioners.

FLOPs are counted as torch counts its own attention: a multiplication and an addition for each element of each product,
by the heads of the queries. A mask, causal or other, saves nothing. Packed sequences count by their own lengths and
sparse attention by its blocks, if these values can be read. Tensors without data (fake, meta) have only shapes: there
each query counts with as many keys as the longest sequence has, and with as many blocks as the lists have room for.
FlopCounterMode sees calls, not kernels: it counts a saved call again when recompute replays it.

A formula that torch, a library or the user has put into torch's table stays. FlopCounterMode copies the table when it
is made: an op that is loaded later counts in the next FlopCounterMode.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from fastac import registry
from fastac.registry import AttentionOp, BoundOp, OpaqueFunction, number_of_keys
from fastac.registry.torch_private import Op, arguments_of, has_no_data, tree_leaves

logger = logging.getLogger("fastac")


class Products(NamedTuple):
    """Sizes of the matrix products of one attention call."""

    # Pairs of a query and a key that it attends to, in all heads and sequences.
    pairs: int
    # Head dim of queries and keys, and of values.
    key_dim: int
    value_dim: int

    def forward(self) -> int:
        """FLOPs of scores and output: torch.utils.flop_counter.sdpa_flop_count."""
        return 2 * self.pairs * (self.key_dim + self.value_dim)

    def backward(self) -> int:
        """FLOPs of the scores, which run again, and of four gradients: as sdpa_backward_flop_count of torch counts.

        Three products are over the head dim of the keys: scores, gradients of query and key. Two are over the head dim
        of the values: gradients of probabilities and values.
        """
        return 2 * self.pairs * (3 * self.key_dim + 2 * self.value_dim)


def products(
    row: AttentionOp | OpaqueFunction, call: Mapping[str, Any], output: torch.Tensor, key: torch.Tensor
) -> Products:
    """The products of a call.

    Args:
        call: the arguments by name.
        output: (..., head dim of the values), or its gradient. Packed outputs have their heads before that dimension.
        key: (..., head dim of queries and keys).
    """
    lengths = [_lengths(call.get(name)) for name in row.flops.offsets]
    blocks = [call[name] for name in row.flops.blocks if name in call]
    if lengths and all(lengths):
        pairs = output.shape[-2] * sum(queries * keys for queries, keys in zip(*lengths, strict=True))
    else:
        pairs = math.prod(output.shape[:-1]) * number_of_keys(row, call.get(row.max_kv or ""), key, row.name)
        if blocks:
            chosen = blocks[0].numel() if has_no_data(blocks[-1]) else int(blocks[-1].sum())
            coarse = call.get(getattr(row, "coarse", ""))
            existing = blocks[0].shape[-1] if coarse is None else coarse.numel()
            pairs = pairs * chosen // (math.prod(blocks[0].shape[:-1]) * existing)
    return Products(pairs, key.shape[-1], output.shape[-1])


def _lengths(offsets: torch.Tensor | None) -> list[int]:
    """Lengths of packed sequences; empty if there are none, or if they cannot be read."""
    if offsets is None or not offsets.numel() or has_no_data(offsets):
        return []
    # Two dimensions: a mask for each sequence, in the place of cumulative lengths.
    lengths: list[int] = (offsets.sum(-1) if offsets.dim() == 2 else offsets.diff()).tolist()
    return lengths


def named_arguments(
    defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A call's arguments by name. defaults: of every argument, in the order of the signature."""
    return {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}


_keys: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], int]] = {}
"""Target of an attention op, forward or backward -> function that gives the number of keys of a call."""


def add_formula(op: Op, formula: Callable[..., int]) -> None:
    """Put a formula (*args, out_val, **kwargs) -> FLOPs into torch's table, unless the op has one."""
    # Not by register_flop_formula, which raises if the op has a formula: the user's formula stays, and two threads may
    # look at a library that was loaded just now.
    flop_registry.setdefault(_target(op), formula)


def of_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """FLOPs of one call of an op; 0 for an op without a formula. Raises what the formula raises."""
    formula = flop_registry.get(_target(op))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def counted(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """The same, or 0 for an op whose formula raises: torch's own does for packed sequences."""
    try:
        return of_call(op, args, kwargs, outputs)
    except Exception as error:  # noqa: BLE001 a figure is lost, no step
        logger.info("no FLOPs are counted for %s: its formula raised %s: %s", op, type(error).__name__, error)
        return 0


def keys_of_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Number of keys in a call of an attention forward, or of its backward; 0 for any other op."""
    count = _keys.get(_target(op))
    return 0 if count is None else int(count(args, kwargs))


def register_formulas(present: Iterable[BoundOp] | None = None) -> None:
    """Give every registered attention op of this process, and the op of its backward, a formula.

    present: these ops, if the caller has looked for them.
    """
    for bound in registry.present_ops() if present is None else present:
        row = bound.row
        if not isinstance(row, AttentionOp):
            continue
        _keys[_target(bound.op)] = bound.keys
        _register(bound.op, row, is_backward=False)
        namespace = bound.qualified_name.partition("::")[0]
        backward = registry.find_op(f"{namespace}::{row.flops.backward}") if row.flops.backward else None
        if backward is not None:
            _register(backward, row, is_backward=True)


def _register(op: Op, row: AttentionOp, is_backward: bool) -> None:
    arguments = arguments_of(op)
    defaults = {argument.name: argument.default for argument in arguments}
    # An op that always writes one of its arguments has its output there, and may return nothing of use.
    written = [argument.name for argument in arguments if argument.written and not argument.optional]

    def forward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call = named_arguments(defaults, args, kwargs)
        output = _tensors(tree_leaves(call[written[0]] if written else out_val))[0]
        return products(row, call, output, call[row.key]).forward()

    def backward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call = named_arguments(defaults, args, kwargs)
        gradient, _, key, _ = _tensors(call.values())[:4]
        return products(row, call, gradient, key).backward()

    def keys_of_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        call = named_arguments(defaults, args, kwargs)
        return number_of_keys(row, call.get(row.max_kv or ""), _tensors(call.values())[2], row.name)

    add_formula(op, backward if is_backward else forward)
    if is_backward:
        _keys[_target(op)] = keys_of_backward


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _target(op: Op) -> Any:
    return getattr(op, "overloadpacket", op)
