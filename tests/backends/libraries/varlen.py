"""torch.nn.attention.varlen: the real custom ops and their Python layer, over `aten::_flash_attention_forward`.

Also the exchange of kernels below the aten ops, which `activate_flash_attention_impl` does: what is saved must be what
the kernel of the moment computes, however late it came.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

from fastac.backends import varlen
from tests.backends import aten_on_cpu, kernels_on_cpu
from tests.backends.parity import LENGTHS, Case, Parity
from tests.support import assert_region

KERNEL = "aten::_flash_attention_forward"


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels() -> Iterator[None]:
    with aten_on_cpu.registered():
        yield


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, **options: Any) -> torch.Tensor:
    return varlen_attn(query, key, value, *LENGTHS.values(), **options)


case = functools.partial(Case, "torch_attn::_varlen_attn", kernel=KERNEL, packed=True)


class TestVarlen(Parity):
    cases = (
        case(attend),
        case(functools.partial(attend, enable_gqa=True), way="grouped", heads=4, kv_heads=2),
    )
    rows = varlen.ROWS


# activate_flash_attention_impl: the exchange of kernels


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]  # type: ignore[no-any-return]


OPS = {KERNEL: TestVarlen.cases[0], "aten::_scaled_dot_product_flash_attention": Case("", dense)}


class Replacement:
    """Kernels in the place of others for as long as it is active, as those of FA3 and FA4. Twice the output."""

    def __init__(self, *ops: str) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        for op in ops:
            name = op.removeprefix("aten::")
            packet = getattr(torch.ops.aten, name)
            kernel = kernels_on_cpu.forward_kernel(f"replaced {op}", packet.default, aten_on_cpu.FORWARD[name])
            self.library.impl(name, functools.partial(self._twice, kernel), "CPU", allow_override=True)

    @staticmethod
    def _twice(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, *others = kernel(*args, **kwargs)
        return (2 * output, *others)

    def remove(self) -> None:
        """As torch asks a handle."""
        self.library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("op", OPS)
def test_the_kernel_of_the_moment_is_saved(op: str, attention_executions: Counter[str]) -> None:
    """Where fastac already stands at the op: before another is activated, while it is, and when the first is back."""
    case = OPS[op]

    def check(kernel: str) -> None:
        assert_region(case.region, case.inputs(), attention_executions)
        assert attention_executions == {kernel: 1}

    register_flash_attention_impl("twice", register_fn=lambda: Replacement(*OPS))
    try:
        check(op)
        activate_flash_attention_impl("twice")
        check(f"replaced {op}")
        restore_flash_attention_impl()
        check(op)
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
