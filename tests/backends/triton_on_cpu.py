"""Triton's own interpreter: the kernels of real libraries run on the CPU, written as they are.

Import this before the libraries. Each patch below says what the interpreter (triton 3.8) lacks.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests import support

_libraries: set[str] = set()


class _Driver:
    """What libraries and the autotuner ask about the device."""

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch=0, warp_size=1)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Measures nothing, so that autotuning takes the first configuration without running them all."""
        return lambda kernel, quantiles=(), **_: [0.0] * max(1, len(quantiles))


triton.runtime.driver.set_active(_Driver())


def takes_for_cuda(*names: str) -> None:
    """To the code of these top-level packages every tensor is on a GPU; to everybody else it is where it is."""
    _libraries.update(names)


_is_cuda = torch._C.TensorBase.is_cuda


def _looks_cuda(tensor: torch.Tensor) -> bool:
    asking = sys._getframe(1).f_globals.get("__name__", "")
    return asking.partition(".")[0] in _libraries or bool(_is_cuda.__get__(tensor))


torch.Tensor.is_cuda = property(_looks_cuda)  # type: ignore[assignment]


# bfloat16 is kept as its bits in numpy's uint16, which the interpreter then calculates with. Calculate in float32.


def _wide(handle: Any) -> Any:
    return _cast(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _cast(handle: Any, dtype: Any) -> Any:
    if handle.dtype.scalar == dtype:
        return handle
    data = torch.from_numpy(np.ascontiguousarray(handle.data))
    wide = data.view(torch.bfloat16).float() if handle.dtype.scalar == tl.bfloat16 else data
    found = wide.to(torch.bfloat16).view(torch.uint16) if dtype == tl.bfloat16 else wide
    return interpreter.TensorHandle(found.numpy().reshape(handle.data.shape), dtype)


_builder = interpreter.InterpreterBuilder
_dot, _binary, _unary, _cast_impl = _builder.create_dot, _builder.binary_op, _builder.unary_op, _builder.cast_impl
_sum = interpreter.ReduceOps.sum


def _create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    return _dot(self, _wide(a), _wide(b), d, *precision)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if lhs.dtype.scalar != tl.bfloat16:
        return _binary(self, lhs, rhs, op)
    found = _binary(self, _wide(lhs), _wide(rhs), op)
    return _cast(found, tl.bfloat16) if found.data.dtype == np.float32 else found  # a comparison stays as it is


def _unary_op(self: Any, arg: Any, op: Any) -> Any:
    return _cast(_unary(self, _wide(arg), op), arg.dtype.scalar)


def _cast_any(self: Any, handle: Any, dtype: Any) -> Any:
    if tl.bfloat16 in (handle.dtype.scalar, dtype.scalar) and handle.dtype.scalar != dtype.scalar:
        wide = _wide(handle)
        wide = wide if wide.dtype.scalar == tl.float32 else _cast_impl(self, wide, tl.float32)
        return _cast(wide, tl.bfloat16) if dtype.scalar == tl.bfloat16 else _cast_impl(self, wide, dtype)
    return _cast_impl(self, handle, dtype)


def _sum_any(self: Any, given: Any) -> Any:
    narrow = given.dtype == tl.bfloat16
    return _sum(self, given.to(tl.float32, _semantic=interpreter.interpreter_semantic) if narrow else given)


_builder.create_dot, _builder.binary_op = _create_dot, _binary_op
_builder.unary_op, _builder.cast_impl = _unary_op, _cast_any
interpreter.ReduceOps.sum = _sum_any


# A loop over `range(tensor)` in a kernel counts in tensors on a GPU and in Python numbers here, which lack `.to`.


def count_in_tensors(module: ModuleType) -> None:
    """Let the kernels of a module count with tensors in `for i in range(...)`."""

    def tensors(*bounds: Any) -> Iterator[Any]:
        for number in builtins.range(*bounds):
            yield tl.core.to_tensor(number, _semantic=interpreter.interpreter_semantic)

    module.range = tensors  # type: ignore[attr-defined]


# A constant of a module (tl.constexpr) is a number to the compiler, and stays a constexpr here: some operators lack
# their mirrored form.

tl.constexpr.__rmod__ = lambda self, other: tl.constexpr(other % self.value)


# Executions


class _Counted:
    def __init__(self, kernel: Any, name: str) -> None:
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            support.executions[self.name] += 1
            return self.kernel[grid](*args, **kwargs)

        return launch


def count_launches(module: ModuleType, kernel: str, name: str) -> None:
    setattr(module, kernel, _Counted(getattr(module, kernel), name))
