"""Offload over real streams and pinned memory, on torch's own test device openreg, where it was built and installed.

It is no package: build test/cpp_extensions/open_registration_extension/torch_openreg in a clone of torch. It copies at
once, whatever the stream: what has to be waited for is seen in tests/engine/test_offload.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastac
from fastac import Policy
from fastac.engine import offload
from fastac.engine.transport import transport_of
from tests.support import assert_same

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

WIDTH = 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 99),
            torch.nn.Linear(99, WIDTH),
        )

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden) + shift)))


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_openreg")
    device = torch.device("openreg", 0)
    monkeypatch.setattr(offload, "SMALLEST", 0)
    transport = transport_of(device)
    assert transport is not None
    assert transport.streams
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block() for _ in range(8)).to(device)
    inputs = torch.randn(1, 100, WIDTH), torch.randn(1, 1, WIDTH)

    def step(policy: Any) -> dict[str, torch.Tensor]:
        blocks.zero_grad()
        video, shift = (one.to(device) for one in inputs)
        hidden = video.requires_grad_() * 1
        for block in blocks:
            hidden = fastac.checkpoint(block, hidden, shift, policy=policy)
        hidden.square().mean().backward()
        gradients = {name: one.grad for name, one in [*blocks.named_parameters(), ("video", video)]}
        return {name: one.cpu() for name, one in gradients.items() if one is not None}

    expected = step("none")
    for _ in range(20):
        assert_same(step(Policy("full", offload=True)), expected)
    transfers = [block._fastac_record.transfers for block in blocks]
    assert [one.host_bytes for one in transfers] == [100 * WIDTH * 4] * 6 + [0, 0]
    assert [one.copies for one in transfers] == [2] * 6 + [0, 0]
