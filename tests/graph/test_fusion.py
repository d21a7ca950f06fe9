"""Inductor's scheduler fuses within the parts of a step: what several regions recompute is never one kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

import fastac
import fastac.graph
from fastac import PolicyNotAppliedError
from fastac.graph import Traced, fusion
from fastac.graph.nodes import RECOMPUTED, is_backward, marks, recomputed_region, region_of
from tests.graph.test_compilation import fresh_compiler  # noqa: F401  (a fixture)
from tests.live_bytes import allocated_peak
from tests.support import relative_error

WIDTH = 32


class Scaled(torch.nn.Module):
    """A block that multiplies by what all blocks are given, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (query * scale, key * scale, value))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended) * scale
        return hidden + self.down(F.gelu(self.up(hidden))) * scale


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"hidden": torch.randn(1, tokens, WIDTH), "scale": torch.randn(tokens, WIDTH)}


def mean_square(output: torch.Tensor, parameters: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(output.square().mean(), parameters)


def applied(
    layers: int = 2, tokens: int = 16, forwards: int = 1, gradients: Callable[..., Any] = mean_square
) -> Traced:
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Scaled() for _ in range(layers))

    def step(hidden: torch.Tensor, scale: torch.Tensor) -> Any:
        returned = []
        for number in range(forwards):
            output = hidden * (number + 1)
            for block in model:
                output = fastac.checkpoint(block, output, scale, policy="attn_only")
            returned.append(gradients(output, list(model.parameters())))
        return returned if forwards > 1 else returned[0]

    return fastac.graph.apply(fastac.graph.trace(step, model, **inputs(tokens)))


def graph_of(step: Traced) -> GraphModule:
    assert isinstance(step.graph_module, GraphModule)
    return step.graph_module


def operation(*nodes: Node) -> Any:
    """What the scheduler holds of an operator that was made from these nodes."""
    one = SimpleNamespace(node=SimpleNamespace(get_origins=lambda: list(nodes)), get_name=lambda: "op")
    one.get_nodes = lambda: [one]
    return one


def kernel(*operations: Any) -> Any:
    """What it holds of operators that it has fused."""
    return SimpleNamespace(
        get_nodes=lambda: list(operations), get_name=lambda: "_".join(o.get_name() for o in operations)
    )


def parts_of(step: Traced) -> list[tuple[fusion.Part, int | None]]:
    """The parts of a step in their order, each with the region whose recomputation begins it."""
    graph = graph_of(step).graph
    fusion.number_parts(graph)
    parts = [node.meta[fusion.PART] for node in graph.nodes]
    assert parts == sorted(parts)
    begins: dict[fusion.Part, int | None] = {}
    for node in graph.nodes:
        begins.setdefault(node.meta[fusion.PART], recomputed_region(node))
    return list(begins.items())


def numbered(*regions: int | None) -> list[tuple[fusion.Part, int | None]]:
    return [(fusion.Part(number, region is not None), region) for number, region in enumerate(regions)]


def test_each_recomputed_region_begins_a_part() -> None:
    """The forward, then the blocks from the last to the first; in each backward anew."""
    step = applied(layers=3)
    first = min(region_of(node) or 99 for node in graph_of(step).graph.nodes if region_of(node) is not None)
    third, second = first + 2, first + 1
    assert parts_of(step) == numbered(None, third, second, first)
    first = first + 3

    def two_losses(output: torch.Tensor, parameters: list[torch.Tensor]) -> Any:
        losses = output.square().mean(), output.mean()
        return [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]

    twice = applied(layers=2, gradients=two_losses)
    assert parts_of(twice) == numbered(None, first + 1, first, first + 1, first)


def test_the_forward_of_another_micro_batch_begins_a_part() -> None:
    step = applied(layers=2, forwards=2)
    parts = parts_of(step)
    first = min(region for _, region in parts if region is not None)
    assert parts == numbered(None, first + 1, first, None, first + 3, first + 2)
    graph = graph_of(step).graph
    forwards = {node.meta[fusion.PART].number: node for node in graph.nodes if region_of(node) is not None}
    recomputed = {node.meta[fusion.PART].number: node for node in graph.nodes if RECOMPUTED in marks(node)}
    assert fusion.mixed([kernel(operation(forwards[3]), operation(recomputed[2]))]) == ["op_op"]
    assert fusion.mixed([kernel(operation(forwards[0]), operation(forwards[3]))]) == []


def test_fusions_of_two_parts_are_not_asked_for() -> None:
    graph = graph_of(applied()).graph
    fusion.number_parts(graph)
    forward = next(node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    by_part = {node.meta[fusion.PART].number: node for node in graph.nodes if RECOMPUTED in marks(node)}
    asked = []
    others = SimpleNamespace(can_fuse=lambda *given: bool(asked.append(given)) or True, another="choice")
    choices = fusion._WithinParts(others)
    assert choices.another == "choice"
    first, second, before = operation(by_part[1]), operation(by_part[2]), operation(forward)
    assert not choices.can_fuse(None, first, second, 9)
    assert not choices.can_fuse(None, before, first, 9)
    assert asked == []
    inlined = operation(forward, by_part[1])
    assert choices.can_fuse("scheduler", first, inlined, 9)
    assert asked == [("scheduler", first, inlined, 9)]


def test_kernels_that_mix_regions_are_found() -> None:
    graph = graph_of(applied()).graph
    fusion.number_parts(graph)
    forward = next(node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    number = {node: node.meta[fusion.PART].number for node in graph.nodes}
    recomputed = {number[node]: node for node in graph.nodes if RECOMPUTED in marks(node)}
    backward = {number[node]: node for node in graph.nodes if is_backward(node) and RECOMPUTED not in marks(node)}
    fine = [
        operation(forward),
        kernel(operation(forward, recomputed[1]), operation(recomputed[1]), operation(backward[1])),
        kernel(operation(recomputed[1]), operation(backward[2])),  # the sum of a gradient: nothing waits for it
    ]
    assert fusion.mixed(fine) == []
    assert fusion.mixed([*fine, kernel(operation(recomputed[1]), operation(recomputed[2]))]) == ["op_op"]
    assert fusion.mixed([*fine, kernel(operation(forward), operation(recomputed[2]))]) == ["op_op"]


def test_without_a_word_in_it_inductor_would_mix_them_and_that_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "within_parts", contextlib.nullcontext)
    with pytest.raises(PolicyNotAppliedError, match=r"inductor fused what several regions recompute.*in [1-9]\d* kern"):
        fastac.graph.compile(applied())(**inputs(16))


def test_the_choices_of_a_process_are_left_alone() -> None:
    from torch._inductor.virtualized import V

    before = V.choices
    with fusion.within_parts():
        assert isinstance(V.choices, fusion._WithinParts)
    assert V.choices is before


@pytest.mark.slow
def test_the_compiled_step_keeps_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(512)
    step = applied(layers=4, tokens=512)
    expected = step(**given)
    peak = allocated_peak(functools.partial(step, **given))
    compiled = fastac.graph.compile(step)
    assert all(relative_error(*pair) < 1e-4 for pair in zip(compiled(**given), expected, strict=True))
    assert allocated_peak(functools.partial(compiled, **given)) < 1.1 * peak
    torch._dynamo.reset()
    monkeypatch.setattr(fusion, "within_parts", contextlib.nullcontext)
    monkeypatch.setattr(fusion, "mixed", lambda scheduled: [])
    without = fastac.graph.compile(step)
    without(**given)
    assert allocated_peak(functools.partial(without, **given)) > 1.2 * peak
