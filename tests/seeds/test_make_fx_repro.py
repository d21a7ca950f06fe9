"""Checkpointing under a make_fx based tracer: the program of pytorch issue 178935, and what it should count.

Full checkpointing in such a trace repeats the first product in backward; with torch's selective checkpointing, told to
recompute it, the graph keeps it. Through fastac the counts are those of eager mode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx.traceback
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


@pytest.fixture(autouse=True)
def metadata_as_before() -> Iterator[None]:
    """torch's part leaves tags behind."""
    before = dict(torch.fx.traceback.current_meta)
    yield
    torch.fx.traceback.current_meta = before


def step_with(layer: Layer, checkpointed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        loss = checkpointed(x).sum()
        return loss, *torch.autograd.grad(loss, [layer.w1, layer.w2])

    return step


def products(graph_module: torch.fx.GraphModule) -> int:
    return sum(node.target is MM for node in graph_module.graph.nodes)


def selective() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if op is MM else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(("context_fn", "seen", "meant"), [(None, 6, 6), (selective, 5, 6)], ids=["full", "selective"])
def test_what_torch_does(context_fn: Any, seen: int, meant: int) -> None:
    """The second is the bug. When torch mends it, this test tells: then put `meant` into `seen`."""
    layer, x = Layer(), torch.randn(2, 4)
    options = {} if context_fn is None else {"context_fn": context_fn}
    step = step_with(layer, lambda x: checkpoint(layer, x, use_reentrant=False, **options))
    graph_module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert products(graph_module) == seen
    with Products() as eager:
        step(x)
    assert eager.counts[MM] == meant


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
