"""Private names of torch for tensors: fake tensors, storages, version counters, nested and batched tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef

# torch has no public pytree module so far: torch.utils has only this one.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an op on fake tensors whose output depends on their values."""


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without data, as tracing and planning use them."""
    return isinstance(value, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data."""
    return FakeTensorMode()


def empty_outputs(op: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Zeros in the shapes that an op would return, without running it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = op(*tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)

    def zeros(fake: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()

    return tree_map_only(torch.Tensor, zeros, outputs)


def efficient_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The memory-efficient attention, which a plan simulates because a CPU has no kernel for it."""
    outputs = torch.ops.aten._scaled_dot_product_efficient_attention.default(*args, **kwargs)
    return outputs[0]  # type: ignore[no-any-return]


def softmax_to_fp32(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The softmax of numbers in fp16, in fp32 without a copy of the numbers, as CUDA has it."""
    return torch.ops.aten._softmax.default(values, dim, True)  # type: ignore[no-any-return]


def is_batched(value: object) -> bool:
    """Whether a value is a tensor of torch.vmap, also after that has ended."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def is_abstract(args: Sequence[object]) -> bool:
    """Whether an op is called to find out its outputs' metadata, not their values: by dynamo, AOT or a planner."""
    # Without the second half, calls that AOT makes with real tensors of meaningless values were recorded: gradients of
    # the first step after each compilation were silently wrong (error 36).
    return (bool(args) and type(args[0]) is FakeTensor) or TracingContext.try_get() is not None


def aliases(values: Sequence[Any]) -> tuple[Any, ...]:
    """Detached aliases that share the version counters of tensors, so that in-place changes of either are noticed."""
    # At BackendSelect the ADInplaceOrView key is excluded, as everywhere below autograd: there `detach()` would make a
    # version counter of its own, and an in-place change of the output gave silently wrong gradients.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tuple([value.detach() if isinstance(value, torch.Tensor) else value for value in values])


def clones(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of tensors with the same strides, also of a part of a buffer, which `clone()` would make contiguous."""
    return tuple([clone(value, value.stride()) if isinstance(value, torch.Tensor) else value for value in values])


def clone(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides; with other ones if some are 0."""
    copy = tensor.clone()
    if copy.stride() != stride and 0 not in stride:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy


def versions(values: Sequence[Any]) -> list[int | None]:
    """Version of each tensor, which counts in-place changes; None for an inference tensor, which has none."""
    return [None if value.is_inference() else value._version for value in values if isinstance(value, torch.Tensor)]


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor. A strided nested tensor has none: the shapes of its parts."""
    try:
        return tensor.shape
    except RuntimeError:
        # "NestedTensorImpl doesn't support sizes". torch develops only the jagged layout, which has a shape
        # (pytorch#132111), so this stays.
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))


Metadata = tuple[tuple[Any, ...], torch.dtype, torch.device, int]


metadata_of_plain = operator.attrgetter("shape", "dtype", "device", "_version")
"""As `metadata`, for any tensor with a shape: one call, because it runs twice for each tensor that a block saves."""


def metadata(tensor: torch.Tensor) -> Metadata:
    """The properties that are compared for every tensor in every step. The version counts in-place changes."""
    return shape_of(tensor), tensor.dtype, tensor.device, tensor._version


def memory(tensor: torch.Tensor) -> object:
    """A key for the storage of a tensor, which views share. Tensors without storage are keyed by identity."""
    try:
        return StorageWeakRef(tensor.untyped_storage()).cdata
    except NotImplementedError:  # sparse tensors
        return id(tensor), "tensor"


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor uses the storage of this one."""
    # Two references are ours: the tensor and the object that untyped_storage() returns. torch has no public count:
    # pytorch#139426 would have added one, and was reverted.
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose version is that of another tensor, and of its views."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)  # assigning `data` keeps the counter
    return counter


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor."""
    # A copy begins at version 0, and autograd would refuse it in the place of the tensor that it saved. FSDP2 sets
    # versions by the same function (pytorch#137921).
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_plain(value: object) -> bool:
    """Whether storage, shape and strides describe a value completely: a tensor; no subclass, no weight, not sparse."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta or not has_storage(value):
        return False
    return not (value.is_inference() or value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested)


# Whether a tensor has a storage (wrapper subclasses have none).
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage


def default_device() -> torch.device | None:
    """The device that torch.set_default_device or `with torch.device(...)` set in this thread, or None."""
    # Both open a mode. If none is open, the slow torch.get_default_device, which walks all modes, need not be asked.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None
