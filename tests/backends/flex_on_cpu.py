"""flex_attention that trains on a CPU, in eager mode, and counts its executions.

On a CPU it refuses inputs that require grad, as inductor has no backward for it there. Its eager math implementation
has one; so the refusal is taken out, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex

from tests import support

OP = "higher_order::flex_attention"

_op = torch.ops.higher_order.flex_attention
_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd


@contextmanager
def registered() -> Iterator[None]:
    """Inside, the math implementation counts itself in `support.executions`; not when it is traced."""
    kernel = _op.py_kernels[_EAGER]

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack() and not isinstance(args[0], torch._subclasses.FakeTensor):
            support.executions[OP] += 1
        return kernel(*args, **kwargs)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "_validate_device", lambda query, key, value: None)
            patch.setitem(_op.py_kernels, _EAGER, counted)
            _op._dispatch_cache.clear()
            yield
    finally:
        _op._dispatch_cache.clear()
