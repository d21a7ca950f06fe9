"""What the tests of fastac.graph share: a training step as users write one, and its comparison with eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fastac
import fastac.graph
from fastac.graph import Traced
from fastac.registry import classify
from tests import support
from tests.support import CPU_ATTENTION, Tensors, assert_same

ATTENTION = f"{CPU_ATTENTION.replace('::', '.')}.default"


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar in which every element of every output has a weight of its own, without a generator."""
    flat = support.flat_tensors(outputs, "output").values()
    weights = [torch.arange(t.numel()).view(t.shape).cos() for t in flat if t.is_floating_point()]
    return torch.stack([(t.float() * weight).sum() for t, weight in zip(flat, weights, strict=True)]).sum()


def step_of(model: torch.nn.Module) -> Callable[..., Any]:
    """A training step of a model: its outputs, a loss, and the gradients of parameters and inputs, by name."""

    def step(**inputs: Any) -> dict[str, Any]:
        outputs = model(**inputs)
        loss = loss_of(outputs)
        leaves = support.leaves_of(model, inputs)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return {"outputs": outputs, "loss": loss, "gradients": dict(zip(leaves, gradients, strict=True))}

    return step


def run(step: Callable[..., Any], inputs: Mapping[str, Any], seed: int = 7) -> Tensors:
    """Every tensor that a step returns, by path; what it draws depends on the seed alone."""
    torch.manual_seed(seed)
    return {name: t.detach().clone() for name, t in support.flat_tensors(step(**inputs), "step").items()}


def traced_step(model: torch.nn.Module, inputs: Mapping[str, Any], policy: Any = "attn_only") -> Traced:
    """The step of a model whose blocks call fastac.checkpoint, as a graph with a policy applied."""
    return fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs), policy)


def assert_exact(
    expected: torch.nn.Module, found: Traced, inputs: Mapping[str, Any], executions: int, seed: int = 7
) -> None:
    """A graph returns, bit for bit, what another model's step does in eager mode, with so many attentions run."""
    support.count_cpu_attention()
    reference = run(step_of(expected), inputs, seed)
    support.executions.clear()
    mine = run(found, inputs, seed)
    assert_same(mine, reference)
    assert support.executions.total() == executions


def targets(graph_module: torch.fx.GraphModule) -> Counter[str]:
    """How often each operator is in a graph."""
    return Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")


def attention_nodes(graph_module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that run an attention forward, by the registry."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and (resolved := classify(node.target)) is not None and resolved.is_attention
    ]


@torch.library.custom_op("fastac_graph_tests::noisy_attention", mutates_args=())
def noisy_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention that drops keys; only its row says that it draws."""
    support.executions["noisy"] += 1
    kept = (torch.rand((*key.shape[:-1], 1)) >= dropout_p).to(key.dtype)
    return (query @ ((key * kept).mT @ value)).contiguous(), kept


@noisy_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> Any:
    return query.new_empty(query.shape), key.new_empty((*key.shape[:-1], 1))


def _noisy_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    query, key, value, kept = ctx.saved_tensors
    inner = query.mT @ gradient
    return gradient @ ((key * kept).mT @ value).mT, (value @ inner.mT) * kept, (key * kept) @ inner, None


noisy_attention.register_autograd(
    _noisy_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3], output[1])
)


def row(**options: Any) -> None:
    """Register a row for `noisy_attention`."""
    fastac.register(
        fastac.AttentionOp(backend="mine", namespace="fastac_graph_tests", name="noisy_attention", **options)
    )
