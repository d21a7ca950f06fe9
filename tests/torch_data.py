"""torch's own test data, and tensors as tests of it need them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

SAMPLES = 8
"""Of an op or module and a dtype: some have hundreds."""


@functools.cache
def torch_data() -> tuple[list[Any], list[Any]]:
    """Ops and modules. Importing them freezes the flags of torch.backends, which other tests set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    return op_db, module_db


def fresh(values: Any) -> Any:
    """Tensors among some values as leaves of their own."""
    return tree_map_only(torch.Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), values)


def some(samples: Any) -> list[Any]:
    samples = list(samples)
    return samples[:: -(-len(samples) // SAMPLES) or 1]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Unlike torch.equal, also of NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [each.resolve_conj().resolve_neg().reshape(-1) for each in (one, other)]
    return torch.equal(*[each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in flat])


def churn() -> bool:
    """Leave numbers in memory that is free: some kernels, such as LAPACK's gelsy, read what they have not written."""
    return bool([torch.rand(size, dtype=torch.float64) for size in range(1, 400)])
