"""FLOPs of attention, forward and backward: for torch's FlopCounterMode, and for what AOT weighs recomputation with.

Counted as torch counts its own attention: a multiplication and an addition for each element of each product, by the
heads of the queries; a mask, causal or other, saves nothing. Packed sequences count by their own lengths and sparse
attention by its blocks, where these values can be read. Of tensors without data (fake, meta) only shapes are known:
there each query counts with as many keys as the longest sequence has, and with as many blocks as the lists have room
for. FlopCounterMode sees calls, not kernels: a saved call that the tape replays in recompute is counted again.

A formula that is there already, torch's or a library's or the user's, stays. FlopCounterMode copies the table when it
is made: an op that is loaded later counts in the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fastac import registry
from fastac.engine import torch_private
from fastac.engine.torch_private import Op
from fastac.registry import KEYS_DIMENSION, AttentionOp, BoundOp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """The sizes of the matrix products of one attention call.

    output: (..., head dim of the values), or its gradient, with its heads before the last dimension where it is packed.
    key: (..., head dim of queries and keys). keys: how many each query may attend to.
    offsets, blocks, coarse: the arguments that AttentionOp names so.
    """

    output: torch.Tensor
    key: torch.Tensor
    keys: int
    offsets: Sequence[torch.Tensor | None] = ()
    blocks: Sequence[torch.Tensor] = ()
    coarse: torch.Tensor | None = None

    def forward(self) -> int:
        """FLOPs of scores and output: torch.utils.flop_counter.sdpa_flop_count."""
        return 2 * self._pairs() * (self.key.shape[-1] + self.output.shape[-1])

    def backward(self) -> int:
        """FLOPs of scores, again, and of four gradients: torch.utils.flop_counter.sdpa_backward_flop_count.

        Of query, key and scores each takes a product over the head dim of the keys; of probabilities and values each
        one over that of the values.
        """
        return 2 * self._pairs() * (3 * self.key.shape[-1] + 2 * self.output.shape[-1])

    def _pairs(self) -> int:
        """Pairs of a query and a key, of all heads and sequences."""
        lengths = [_lengths(tensor) for tensor in self.offsets]
        if lengths and all(lengths):
            together = sum(queries * keys for queries, keys in zip(*lengths, strict=True))
            return int(self.output.shape[-2] * together)
        pairs: int = math.prod(self.output.shape[:-1]) * self.keys
        if not self.blocks:
            return pairs
        chosen = int(self.blocks[-1].sum()) if _can_be_read(self.blocks[-1]) else self.blocks[0].numel()
        of_keys = self.blocks[0].shape[-1] if self.coarse is None else self.coarse.numel()
        return pairs * chosen // (math.prod(self.blocks[0].shape[:-1]) * of_keys)


def _can_be_read(tensor: torch.Tensor) -> bool:
    return not torch_private.has_no_data(tensor)


def _lengths(offsets: torch.Tensor | None) -> list[int]:
    """Of packed sequences; empty where there are none, or they cannot be read."""
    if offsets is None or not offsets.numel() or not _can_be_read(offsets):
        return []
    found: list[int] = (offsets.sum(-1) if offsets.dim() == 2 else offsets.diff()).tolist()
    return found


Formula = Callable[..., int]

_keys: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], int]] = {}
"""Target of an attention op, forward or backward -> over how many keys a call of it attends."""


def add(op: Op, formula: Formula) -> bool:
    """Put a formula (*args, out_val, **kwargs) -> FLOPs into torch's table, unless the op has one."""
    # Not by register_flop_formula: two threads may look at a library that was loaded just now.
    return flop_registry.setdefault(_target(op), formula) is formula


def of_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """FLOPs of one call of an op; 0 for one without a formula."""
    formula = flop_registry.get(_target(op))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def keys_of_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Over how many keys a call attends, of the forward of an attention or of its backward; 0 for any other op."""
    count = _keys.get(_target(op))
    return 0 if count is None else int(count(args, kwargs))


def register_formulas() -> list[str]:
    """Give every registered attention op of this process, and the op of its backward, a formula.

    Returns the names of the ops that got one.
    """
    made = []
    for bound in registry.present_ops():
        row = bound.row
        if not isinstance(row, AttentionOp):
            continue
        _keys[_target(bound.op)] = bound.keys
        if _target(bound.op) not in flop_registry and add(bound.op, _forward(bound, row)):
            made.append(bound.name)
        namespace = bound.qualified_name.partition("::")[0]
        backward = registry.find_op(f"{namespace}::{row.flops.backward}") if row.flops.backward else None
        if backward is not None:
            _keys[_target(backward)] = _keys_of_backward(backward, row)
        if backward is not None and _target(backward) not in flop_registry and add(backward, _backward(backward, row)):
            made.append(str(backward))
    return made


def _target(op: Op) -> Any:
    return getattr(op, "overloadpacket", op)


def _forward(bound: BoundOp, row: AttentionOp) -> Formula:
    arguments = torch_private.arguments_of(bound.op)
    # An op that writes an argument it must be given has its output there, and may return nothing of use.
    written = [argument.name for argument in arguments if argument.written and not argument.optional]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call = _named(arguments, args, kwargs)
        outputs = call[written[0]] if written else out_val
        output = next(value for value in torch_private.tree_leaves(outputs) if isinstance(value, torch.Tensor))
        return _products(row, call, output, call[row.key]).forward()

    return flops


def _backward(op: Op, row: AttentionOp) -> Formula:
    arguments = torch_private.arguments_of(op)

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call = _named(arguments, args, kwargs)
        grad, _, key, _ = [value for value in call.values() if isinstance(value, torch.Tensor)][:4]
        return _products(row, call, grad, key).backward()

    return flops


def _keys_of_backward(op: Op, row: AttentionOp) -> Callable[[Sequence[Any], Mapping[str, Any]], int]:
    arguments = torch_private.arguments_of(op)

    def keys(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        call = _named(arguments, args, kwargs)
        grad, _, key, _ = [value for value in call.values() if isinstance(value, torch.Tensor)][:4]
        return _products(row, call, grad, key).keys

    return keys


def _named(
    arguments: Sequence[torch_private.Argument], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name, in the order of the schema."""
    defaults = {argument.name: argument.default for argument in arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def _products(row: AttentionOp, call: Mapping[str, Any], output: torch.Tensor, key: torch.Tensor) -> Products:
    longest = call.get(row.max_kv) if row.max_kv is not None else None
    if longest is None or longest < 0:  # some libraries pass -1 where nothing is packed
        longest = key.shape[KEYS_DIMENSION[row.layout]]
    return Products(
        output=output,
        key=key,
        keys=longest,
        offsets=[call.get(name) for name in row.flops.offsets],
        blocks=[call[name] for name in row.flops.blocks if name in call],
        coarse=call.get(row.coarse),
    )
