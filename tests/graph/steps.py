"""What the tests of fastac.graph share: a training step as users write one, and its comparison with eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fastac.graph
from fastac.graph import Traced
from tests import support
from tests.graph.partitioned import is_attention
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
    return [node for node in graph_module.graph.nodes if node.op == "call_function" and is_attention(node)]


noisy_attention = support.attention_function(support.define_attention_op("noisy_attention", "dropout"))
"""Attention over query, key, value and dropout_p. Only its row says that it draws."""


@torch.library.register_fake(f"{support.NAMESPACE}::noisy_attention")
def _(query: torch.Tensor, key: torch.Tensor, *_: Any) -> Any:
    rows = query.shape[:-1]
    return query.new_empty(query.shape), query.new_empty(rows), query.new_empty((*rows, key.shape[-2]))
