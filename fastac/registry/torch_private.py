"""Ops of torch's dispatcher. `fastac.engine.torch_private` checks that the private name is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HigherOrderOperator = torch._ops.HigherOrderOperator
Op = torch._ops.OpOverload | HigherOrderOperator

DEVICES = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
"""Kinds of devices, as they stand in the names of dispatch keys."""


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


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own at a dispatch key, such as "CPU" or "BackendSelect"."""
    if qualified_name.startswith("higher_order::"):
        op = getattr(torch.ops.higher_order, qualified_name.removeprefix("higher_order::"))
        return getattr(torch._C.DispatchKey, dispatch_key) in op.py_kernels
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key)


def handles(qualified_name: str, feature: str) -> bool:
    """Whether an op has a kernel for "Autograd" or "Autocast" on some device. One that falls through is none.

    Without one, autograd (autocast) is on inside the op's kernels.
    """
    names = [feature] if feature == "Autograd" else []
    for key in [*names, *(feature + device for device in DEVICES)]:
        if has_kernel(qualified_name, key):
            return not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(qualified_name, key)
    return False


def redispatch_of(op: Op) -> Callable[..., Any]:
    """A function (keyset, *args, **kwargs) that calls an op's kernel for a keyset."""
    if not isinstance(op, HigherOrderOperator):
        return op.redispatch
    return lambda keyset, *args, **kwargs: op.dispatch(keyset.highestPriorityTypeId(), *args, **kwargs)
