"""Ops of torch's dispatcher. `fastac.engine.torch_private` checks that the private name is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HigherOrderOperator = torch._ops.HigherOrderOperator
Op = torch._ops.OpOverload | HigherOrderOperator


def qualified_name(op: Op) -> str:
    """`namespace::name`, with `.overload` where it has one."""
    if isinstance(op, HigherOrderOperator):
        return f"{op.namespace}::{op.name()}"
    name: str = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def op_names() -> list[str]:
    """`namespace::name.overload` of every op that the dispatcher knows now."""
    return torch._C._dispatch_get_all_op_names()


class Argument(NamedTuple):
    """One argument of an op."""

    name: str
    default: Any
    written: bool  # the op may change the tensor
    optional: bool  # it may be None


def arguments_of(op: Op) -> list[Argument]:
    """An op's arguments, from its schema; those of a higher-order op, which has none, from its signature."""
    if isinstance(op, HigherOrderOperator):
        parameters = inspect.signature(op.__call__).parameters.values()
        return [Argument(parameter.name, parameter.default, False, False) for parameter in parameters]
    return [
        Argument(
            argument.name,
            argument.default_value,
            argument.alias_info is not None and argument.alias_info.is_write,
            isinstance(argument.type, torch.OptionalType),
        )
        for argument in op._schema.arguments
    ]


def returns_tensors(op: Op) -> bool:
    """Whether an op has a tensor among its outputs. A higher-order op does not say: it counts as having one."""
    return isinstance(op, HigherOrderOperator) or any("Tensor" in str(one.type) for one in op._schema.returns)


def redispatch_of(op: Op) -> Callable[..., Any]:
    """A function (keyset, *args, **kwargs) that calls an op's kernel for a keyset."""
    if not isinstance(op, HigherOrderOperator):
        return op.redispatch
    return lambda keyset, *args, **kwargs: op.dispatch(keyset.highestPriorityTypeId(), *args, **kwargs)
