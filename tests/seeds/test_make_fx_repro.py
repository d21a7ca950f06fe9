"""Checkpointing under a make_fx based tracer: the program of pytorch issue 178935, and what it should count.

Full checkpointing in such a trace repeats the first product in backward; with torch's selective checkpointing, told to
recompute it, the graph keeps it. Through fastac the counts are those of eager mode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.traceback
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastac
import fastac.graph

MM = torch.ops.aten.mm.default


class Layer(torch.nn.Module):
    """mm, gelu, mm."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.randn(4, 8))
        self.w2 = torch.nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.w1) @ self.w2


class Products(TorchDispatchMode):
    """Counts matrix products that are really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def step_with(layer: Layer, checkpointed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        loss = checkpointed(x).sum()
        return loss, *torch.autograd.grad(loss, [layer.w1, layer.w2])

    return step


def products(graph_module: torch.fx.GraphModule) -> int:
    return sum(node.target is MM for node in graph_module.graph.nodes)


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_what_fastac_does(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first product is recomputed, in the graph and in eager mode; there is no attention to save."""
    layer, x = Layer(), torch.randn(2, 4)
    step = step_with(layer, lambda x: fastac.checkpoint(layer, x, policy=policy))
    with caplog.at_level(logging.WARNING, "fastac"):
        traced = fastac.graph.trace(step, layer, x)
    assert not caplog.records, "fastac.graph.trace is the tracer for which regions are marked"
    assert products(traced.graph_module) == 5  # no recompute of its own in a trace
    done = fastac.graph.apply(traced)
    assert products(done.graph_module) == 6
    with Products() as eager:
        expected = step(x)
    with Products() as graph:
        found = done(x)
    assert graph.counts[MM] == eager.counts[MM] == 6
    assert all(map(torch.equal, found, expected))
    (gelu_backward,) = (n for n in done.graph_module.graph.nodes if n.target is torch.ops.aten.gelu_backward.default)
    detached = gelu_backward.args[1]
    while detached.target is torch.ops.aten.detach.default:
        detached = detached.args[0]
    assert detached.target is MM
    assert detached.name.endswith("_recomputed")
