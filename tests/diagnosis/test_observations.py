"""How many regions are observed, at 10 to 20 times the host time of another: few, whatever calls a run makes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import PolicyNotAppliedError
from fastac.diagnosis.observation import Observation
from fastac.engine import kinds
from fastac.engine.kinds import SIGNATURES
from fastac.engine.process import process
from fastac.engine.results import Kind
from tests.diagnosis.hidden import PastTheDispatcher
from tests.support import stack, stack_inputs, train_step

STEPS = 30


class HiddenAttention(PastTheDispatcher):
    """Its name says attention."""


class Block(torch.nn.Module):
    """Makes as many attention calls as it is told to. The last one may be hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(16) / 2)
        self.calls = 2
        self.hides = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for call in range(self.calls):
            heads = (hidden @ self.weight).unflatten(-1, (2, 8)).transpose(1, 2)
            is_hidden = self.hides and call == self.calls - 1
            attend = HiddenAttention.apply if is_hidden else F.scaled_dot_product_attention
            hidden = hidden + attend(heads, heads, heads).transpose(1, 2).flatten(2)
        return hidden


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Every observation that a test makes."""
    observations: list[Observation] = []
    enter = Observation.__enter__
    monkeypatch.setattr(Observation, "__enter__", lambda self: observations.append(self) or enter(self))
    return observations


def train(block: Block, calls: Iterable[int], tokens: Iterable[int], way: str = "block") -> None:
    """A step for each number of calls, in which the block is a region, or a function that runs it is one."""
    for block.calls, length in zip(calls, tokens, strict=False):
        hidden = torch.randn(1, length, 16, requires_grad=True)
        function = block if way == "block" else lambda hidden: block(hidden)
        output = fastac.checkpoint(function, hidden)
        output.sum().backward()


def numbers(text: str) -> Iterator[int]:
    """As written, the last one for ever."""
    written = [int(number) for number in text.split(",")]
    return itertools.chain(written, itertools.repeat(written[-1]))


def at_random() -> Iterator[int]:
    draw = random.Random(0)
    return iter(lambda: 1 + (draw.random() > 0.3), None)


@pytest.mark.parametrize("way", ["block", "function"])
@pytest.mark.parametrize(
    ("calls", "most"),
    [("2,2", 1), ("2,3,2", 1), ("2,1,2", 9), ("2,1,1", 2), ("3,2,1,3", 2), ("1,2,3,4,5", 1), ("at random", 9)],
)
def test_calls_that_vary(calls: str, most: int, way: str, observed: list[Observation]) -> None:
    """The first region, and after fewer calls the next ones until one of these makes fewer as well: at most eight."""
    train(
        Block(),
        itertools.islice(at_random() if calls == "at random" else numbers(calls), STEPS),
        itertools.repeat(8),
        way,
    )
    assert len(observed) == most if calls != "at random" else 2 <= len(observed) <= most


@pytest.mark.parametrize("way", ["block", "function"])
@pytest.mark.parametrize(("calls", "most"), [("2,2", SIGNATURES + 1), ("2,1,2", SIGNATURES + 1)])
def test_lengths_that_never_repeat(calls: str, most: int, way: str, observed: list[Observation]) -> None:
    """After a few lengths the next is expected to make the same calls, and nothing is noted for it."""
    train(Block(), itertools.islice(numbers(calls), STEPS), itertools.count(8), way)
    assert len(observed) == most
    assert sum(map(len, process.kinds.values())) == SIGNATURES + 1


def rows(step: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 16) for _ in range(step + 1)]


@pytest.mark.parametrize(
    ("inputs", "most"),
    [
        (lambda step: {"prompt": f"prompt {step}"}, 1),
        (lambda step: {"info": {f"sample {step}": torch.ones(1)}}, 1),
        (lambda step: {"info": [{"id": str(step)}, (1.5 * step, "video")]}, 1),
        (lambda step: {"info": rows(step)}, SIGNATURES + 1),
        (lambda step: {"info": {f"row {n}": row for n, row in enumerate(rows(step))}}, SIGNATURES + 1),
        (lambda step: {f"row {step}": torch.ones(1)}, SIGNATURES + 1),
        (lambda step: {"info": [bool(step & 2**bit) for bit in range(6)]}, 3 * SIGNATURES + 3),
    ],
    ids=["string", "key", "inside", "list that grows", "dict that grows", "keyword", "flags"],
)
def test_inputs_that_are_new_in_each_step(inputs: Any, most: int, observed: list[Observation]) -> None:
    """What no op can see makes no kinds, and lengths are bounded as shapes are."""

    class Described(Block):
        def forward(self, hidden: torch.Tensor, **described: Any) -> torch.Tensor:
            return super().forward(hidden)

    block = Described()
    for step in range(STEPS):
        hidden = torch.randn(1, 8, 16, requires_grad=True)
        fastac.checkpoint(block, hidden, policy="attn_only", **inputs(step)).sum().backward()
    assert 1 <= len(observed) <= most


@pytest.mark.parametrize("way", ["block", "function"])
def test_attention_hidden_in_a_length_that_is_not_observed(way: str) -> None:
    """It makes fewer calls than the others: the block's next regions are observed."""
    block = Block()
    train(block, itertools.repeat(2, STEPS), itertools.count(8), way)
    block.hides = True
    train(block, [2], [99], way)
    with pytest.raises(PolicyNotAppliedError, match="HiddenAttention"):
        train(block, [2], [100], way)


def test_a_policy_of_long_attention_waits_for_long_ones(observed: list[Observation]) -> None:
    """What is too short to be saved says nothing of what is long enough. Shorter inputs are known by then."""
    block, policy = Block(), fastac.Policy("long_attn_only", min_kv=40)
    for length in (*range(12, 12 + SIGNATURES), *range(2, 12), 24, 44, 45):
        fastac.checkpoint(block, torch.randn(1, length, 16, requires_grad=True), policy=policy).sum().backward()
    assert len(observed) == SIGNATURES + 4


class Neutral(torch.autograd.Function):
    """Runs again, and nothing says what it is."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_the_report_names_what_runs_again_at_every_length() -> None:
    """Also at lengths that were not observed."""
    model = stack(layers=1)
    model.blocks[0].norms[0] = torch.nn.Sequential(model.blocks[0].norms[0], Applying())
    fastac.enable(model, blocks="blocks")
    inputs = stack_inputs()
    for length in range(2, SIGNATURES + 5):
        train_step(model, {**inputs, "video": inputs["video"][:, :length]})
        assert any("Neutral" in name for name in fastac.report(model).rows[0].unknown), length


class Applying(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Neutral.apply(hidden)  # type: ignore[no-any-return]


def test_another_thread_adds_kinds_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that train blocks of one class share their kinds."""
    block, without_shapes = Block(), kinds.without_shapes

    def meanwhile(*args: Any) -> Any:
        for known in process.kinds.values():
            known[object()] = Kind((fastac.Policy("attn_only"), None, None))
        return without_shapes(*args)

    monkeypatch.setattr(kinds, "without_shapes", meanwhile)
    train(block, itertools.repeat(2, 3), itertools.count(8))
    kinds.ops_called()


def test_gradients_are_exact_whatever_is_observed() -> None:
    """Every third step makes fewer calls, and no length repeats."""
    checkpointed, plain = Block(), Block()
    for step in range(20):
        checkpointed.calls = plain.calls = 1 + (step % 3 > 0)
        hidden = torch.randn(1, 8 + step, 16)
        fastac.checkpoint(checkpointed, hidden).sum().backward()
        plain(hidden).sum().backward()
        assert torch.equal(checkpointed.weight.grad, plain.weight.grad)
