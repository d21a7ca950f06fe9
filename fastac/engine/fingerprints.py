"""Fingerprints of tensors: numbers that differ if the values do, so that no copy is needed to compare them.

They are a tensor's 2-norm, and for each of its two longest dimensions its sum with weights that grow from 1 to 2 along
that dimension. The weights show tokens that change places. Sums of integers are exact.

If every element changes by a relative error d of random sign, all three numbers move by about d times the norm. Kernels
that add up in another order cause noise of this form, and `tolerance` is the most that it reaches.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine import torch_private
from fastac.engine.process import process

_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, torch.complex64), torch.float32),
    **dict.fromkeys((torch.float64, torch.complex128), torch.float64),
    **dict.fromkeys((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
}
"""Dtype that has fingerprints -> dtype of its sums. float8 and smaller are missing because torch adds them up only as
copies, and uint8 because it holds workspaces of kernels and packed weights."""


class Fingerprint(NamedTuple):
    """Numbers of one tensor. For a tensor on an accelerator they are tensors there, and nobody waits for them."""

    dtype: torch.dtype
    sums: list[Any]
    norm: Any  # 0 for integers

    @property
    def is_read_later(self) -> bool:
        """Whether its numbers are on an accelerator."""
        return isinstance(self.norm, torch.Tensor)


COMPARISON = "fastac::comparison"
"""Name of a fingerprint in the profile of fastac.verify, which does not count its time as recompute."""


def _named() -> contextlib.AbstractContextManager[Any]:
    return torch.profiler.record_function(COMPARISON) if process.replayed_calls else contextlib.nullcontext()


def fingerprint(tensor: torch.Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None without plain values: a subclass, sparse, nested, empty, on "meta".

    None also for one or two integers: attention kernels save a seed, and leave it unset if they draw nothing.
    """
    wide = _WIDE.get(tensor.dtype)
    if wide is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() <= (2 if wide is torch.int64 else 0):
        return None
    if not tensor.untyped_storage().nbytes():  # somebody has freed it, as FSDP does
        return None
    # Modes of the user (a FLOP counter, a profiler of memory) must not see ops that are not the model's.
    with torch_private.without_modes(), torch.no_grad(), _named():
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        longest = sorted(range(values.dim()), key=lambda dim: values.shape[dim])[-2:]
        sums = [_weighted_sum(values, dim, wide) for dim in longest] or [values.sum(dtype=wide)]
        is_integer = wide is torch.int64
        norm = values.new_zeros((), dtype=wide) if is_integer else torch.linalg.vector_norm(values, dtype=wide)
        numbers: list[Any] = [*sums, norm]
        if tensor.device.type == "cpu":
            numbers = [number.item() for number in numbers]
    return Fingerprint(tensor.dtype, numbers[:-1], numbers[-1])


def _weighted_sum(values: torch.Tensor, dim: int, wide: torch.dtype) -> torch.Tensor:
    """The sum with weights that grow from 1 to 2 along `dim`; for integers, from its length to twice that."""
    others = [other for other in range(values.dim()) if other != dim]
    along = values.sum(others, dtype=wide) if others else values.to(wide)
    weights = torch.arange(len(along), 2 * len(along), dtype=wide, device=along.device)
    total = (along * weights).sum()
    return total if wide is torch.int64 else total / len(along)


def tolerance(dtype: torch.dtype) -> float:
    """The most by which fingerprints of equal computations differ, relative to the norm; 0 for integers.

    8 units in the last place (6.3 % in bf16, 0.8 % in fp16), and 1024 units of the dtype of sums (0.012 % in fp32): a
    million terms, added up in another order, differ by the square root of that. Kernels that accumulate in fp32 and
    round once stay below 2 units in 80 trainings (`pytest -m soak tests/ways/test_no_false_alarm.py`).
    """
    wide = _WIDE[dtype]
    return 0.0 if wide is torch.int64 else 8 * torch.finfo(dtype).eps + 1024 * torch.finfo(wide).eps


def relative_difference(forward: Fingerprint, recomputed: Fingerprint) -> float:
    """Difference of two fingerprints, relative to the norm: 0 if they are equal, infinite for unequal integers."""
    largest, scale = 0.0, max(float(forward.norm), float(recomputed.norm))
    for first, second in zip((*forward.sums, forward.norm), (*recomputed.sums, recomputed.norm), strict=True):
        # A batch with NaN in it is legal: recompute gives NaN in the same places.
        if first != second and not (math.isnan(first) and math.isnan(second)):
            apart = float(abs(first - second)) / scale if scale else math.inf
            largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest


_FORMATS = {torch.float32: "f", torch.float64: "d", torch.int64: "q"}
"""Dtype of a number -> its letter in the formats of the module struct."""


def read(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """The fingerprints with numbers on the host. Waits for the accelerator once: the bytes of all come together."""
    numbers = [number for fingerprint in fingerprints for number in (*fingerprint.sums, fingerprint.norm)]
    device = numbers[0].device
    with torch_private.without_modes():
        parts = [number.reshape(1).view(torch.uint8) for number in numbers]
        data = bytes(torch.cat([part if part.device == device else part.to(device) for part in parts]).tolist())
    values = iter(struct.unpack("=" + "".join(_FORMATS[number.dtype] for number in numbers), data))
    return [Fingerprint(each.dtype, [next(values) for _ in each.sums], next(values)) for each in fingerprints]
