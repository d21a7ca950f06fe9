"""Ops of torch's dispatcher: their names, arguments and kernels.

The dispatcher's registry is public only for C++. torch.library registers ops and kernels, and lists none. A function of
`torch._C` that this build of torch lacks is an error of `fastac.engine.torch_private.names`. pytorch#1234 is issue or
pull request 1234 of github.com/pytorch/pytorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# torch has no public pytree module so far.
from torch.utils._pytree import tree_leaves as tree_leaves

# Neither class has a public name. torch documents OpOverload under this one.
HigherOrderOperator = torch._ops.HigherOrderOperator
Op = torch._ops.OpOverload | HigherOrderOperator

DEVICES = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
"""Types of devices, as in the names of dispatch keys."""


def qualified_name(op: Op) -> str:
    """`namespace::name`, with `.overload` if the op has one."""
    if isinstance(op, HigherOrderOperator):
        return f"{op.namespace}::{op.name()}"
    name: str = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def name_of(op: Op) -> str:
    """`namespace::name`, without an overload."""
    return qualified_name(op).partition(".")[0]


def is_of_torch(op: Any) -> bool:
    """Whether an op is one of torch's own. Higher-order ops are."""
    # torch.library defines none of those: their backward and their rules for tracers are Python of torch.
    return not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prim", "prims")


def is_from_torch(op: Op) -> bool:
    """Whether torch itself, or a part of it, defines an op."""
    return isinstance(op, HigherOrderOperator) or op.namespace in TORCH_NAMESPACES


def op_names() -> list[str]:
    """`namespace::name.overload` of every op that the dispatcher knows now."""
    return torch._C._dispatch_get_all_op_names()


# fmt: off
TORCH_NAMESPACES = frozenset([
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "aten", "c10d",
    "c10d_functional", "debug_mode_ops", "debugprims", "export", "flex_lib", "fsdp", "inductor", "inductor_prims",
    "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prim", "prims", "profiler",
    "quantization", "quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams",
    "symm_mem", "torch_attn",
])
# fmt: on
"""Namespaces of ops that torch 2.13 defines."""


class Argument(NamedTuple):
    """One argument of an op."""

    name: str
    default: Any
    # The op may change the tensor.
    written: bool
    # It may be None.
    optional: bool
    # "Tensor", "Optional[Tensor]", "List[Tensor]", ...; "" for a higher-order op.
    type: str


def arguments_of(op: Op) -> list[Argument]:
    """An op's arguments, from its schema. A higher-order op has no schema: its arguments are those of its signature."""
    if isinstance(op, HigherOrderOperator):
        parameters = inspect.signature(op.__call__).parameters.values()
        return [Argument(parameter.name, parameter.default, False, False, "") for parameter in parameters]
    return [
        Argument(
            argument.name,
            argument.default_value,
            argument.alias_info is not None and argument.alias_info.is_write,
            isinstance(argument.type, torch.OptionalType),
            str(argument.type),
        )
        for argument in op._schema.arguments
    ]


def always_written(op: Op) -> list[str]:
    """The arguments that an op writes in every call."""
    # An optional argument may be None, as `out` of flash-attn 3 may be. BoundOp.check_call looks at each call instead.
    return [argument.name for argument in arguments_of(op) if argument.written and not argument.optional]


def has_functional_overload(op: Op) -> bool:
    """Whether another overload of an op writes none of its arguments: true for an `out` overload."""
    packet = None if isinstance(op, HigherOrderOperator) else op._overloadpacket
    return packet is not None and not all(always_written(getattr(packet, name)) for name in packet.overloads())


def returns_tensors(op: Op) -> bool:
    """Whether an op has a tensor among its outputs. A higher-order op does not say: it counts as having one."""
    return isinstance(op, HigherOrderOperator) or any("Tensor" in str(value.type) for value in op._schema.returns)


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether an op has a kernel of its own at a dispatch key, such as "CPU" or "BackendSelect"."""
    # torch.library.get_kernel (pytorch#158393, since torch 2.9) gives the kernel that a call would reach: also one that
    # all ops share.
    if qualified_name.startswith("higher_order::"):
        op = getattr(torch.ops.higher_order, qualified_name.removeprefix("higher_order::"))
        return getattr(torch._C.DispatchKey, dispatch_key) in op.py_kernels
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key)


def handles(qualified_name: str, feature: str) -> bool:
    """Whether an op has a kernel for "Autograd" or "Autocast" on some device, other than one that falls through.

    Without such a kernel, autograd (autocast) is on inside the op's kernels.
    """
    # torch has a key Autograd for all devices, and no such key for autocast.
    names = [feature] if feature == "Autograd" else []
    for key in [*names, *(feature + device for device in DEVICES)]:
        if has_kernel(qualified_name, key):
            return not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(qualified_name, key)
    return False


def only_kernel(qualified_name: str) -> str:
    """ "CompositeImplicitAutograd" or "Autograd" if an op has this kernel, and has no kernel for a device; else "".

    Calls of such an op end at that kernel, above BackendSelect.
    """
    if any(has_kernel(qualified_name, key) for key in ("CompositeExplicitAutograd", *DEVICES)):
        return ""
    composite = has_kernel(qualified_name, "CompositeImplicitAutograd")
    return "CompositeImplicitAutograd" if composite else "Autograd" * handles(qualified_name, "Autograd")


def redispatch_of(op: Op) -> Callable[..., Any]:
    """A function (keyset, *args, **kwargs) that calls an op's kernel for a keyset."""
    if not isinstance(op, HigherOrderOperator):
        return op.redispatch  # pytorch#124089
    # A higher-order op is dispatched by key, in Python.
    return lambda keyset, *args, **kwargs: op.dispatch(keyset.highestPriorityTypeId(), *args, **kwargs)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no data, as in a trace or on the meta device."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta
