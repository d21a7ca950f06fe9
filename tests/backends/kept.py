"""What fastac holds of one attention call, by its own count: for kernels whose backward needs more than an output."""

from __future__ import annotations

from typing import Any

import torch

from fastac.engine import blocks
from tests import support
from tests.backends.parity import Case


class _Block(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, query: torch.Tensor, others: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return self.case.region(query, *others)


def kept_of(case: Case, dtype: torch.dtype = torch.float32, engine: str = "tape") -> tuple[int, int]:
    """Bytes that one call of a case's attention holds, and how many of them its backward needs beside its output."""
    block = _Block(case)
    query, key, value = case.inputs(dtype).values()
    support.run_checkpointed(block, query, (key, value), policy="attn_only", engine=engine)
    record = blocks.block_record(block)
    assert record is not None
    assert record.latest is not None
    (call,) = record.latest.calls
    assert call.saved
    return call.saved_bytes, call.extra_bytes
