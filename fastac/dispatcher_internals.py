"""What is private in torch's dispatcher and fastac uses: which ops there are, what they take, and how to call them.

Seen in torch 2.13. Each name is looked up at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastac import probing

_REQUIRED = (
    "_C.DispatchKey.BackendSelect",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_keyset_full_after",
    "_ops.HigherOrderOperator.dispatch",
    "_ops.HigherOrderOperator.py_impl",
    "_ops._compute_keyset",
)

probing.require(_REQUIRED)

_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
BELOW_BACKEND_SELECT = torch._C._dispatch_keyset_full_after(_BACKEND_SELECT)
"""Keys to redispatch a call to: the kernel below BackendSelect, which then runs with the GIL released."""


def op_names() -> list[str]:
    """`namespace::name.overload` of every op the dispatcher knows at this moment."""
    return torch._C._dispatch_get_all_op_names()


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own at a dispatch key, such as "CPU" or "BackendSelect"."""
    if qualified_name.startswith("higher_order::"):
        op = getattr(torch.ops.higher_order, qualified_name.removeprefix("higher_order::"))
        return getattr(torch._C.DispatchKey, dispatch_key) in op.py_kernels
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key)


class Argument(NamedTuple):
    """One argument of an op. written: the op may change the tensor; optional: it may be None."""

    name: str
    default: Any
    written: bool
    optional: bool


def arguments_of(op: torch._ops.OpOverload | torch._ops.HigherOrderOperator) -> list[Argument]:
    """An op's arguments, from its schema; those of a higher-order op, which has none, from its signature."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        parameters = list(inspect.signature(op.__call__).parameters.values())
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


def returns_tensors(op: torch._ops.OpOverload | torch._ops.HigherOrderOperator) -> bool:
    """Whether an op has a tensor among its outputs; a higher-order op does not say, and counts as having one."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return True
    return any("Tensor" in str(output.type) for output in op._schema.returns)


def redispatch_of(op: torch._ops.OpOverload | torch._ops.HigherOrderOperator) -> Callable[..., Any]:
    """A function (keyset, *args, **kwargs) that calls an op's kernel for a keyset."""
    if not isinstance(op, torch._ops.HigherOrderOperator):
        return op.redispatch

    def redispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.dispatch(keyset.highestPriorityTypeId(), *args, **kwargs)

    return redispatch


def at_backend_select(op: torch._ops.HigherOrderOperator, function: Callable[..., Any]) -> None:
    """Let calls of a higher-order op pass by function(keyset, *args, **kwargs), as an implementation does for an op."""

    def called(*args: Any, **kwargs: Any) -> Any:
        keyset = torch._ops._compute_keyset(args, kwargs, op.non_fallthrough_keys)
        return function(keyset, *args, **kwargs)

    op.py_impl(_BACKEND_SELECT)(called)


def is_composite(qualified_name: str) -> bool:
    """Whether an op only calls other ops, which are dispatched in turn. Modes see it under inference mode alone."""
    return has_kernel(qualified_name, "CompositeImplicitAutograd")
