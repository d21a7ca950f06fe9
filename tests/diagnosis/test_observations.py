"""How many regions are observed, at 10 to 20 times the host time of another: few, whatever calls a run makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import PolicyNotAppliedError
from fastac.engine.process import process
from tests.diagnosis.observed import HiddenAttention
from tests.diagnosis.test_hidden_functions import hidden as hidden_function
from tests.support import stack, stack_inputs, train_step

STEPS = 30
LENGTHS = 8
"""So many that differ in nothing else are observed; then all others are one kind."""


class Block(torch.nn.Module):
    """Makes as many attention calls as it is told to. The last one may be hidden.

    observed: how many forwards ran under a mode, as observed ones do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(16) / 2)
        self.calls, self.hides, self.observed = 2, False, 0

    def forward(self, hidden: torch.Tensor, **described: Any) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            self.observed += torch._C._len_torch_dispatch_stack() > 0
        for call in range(self.calls):
            heads = (hidden @ self.weight).unflatten(-1, (2, 8)).transpose(1, 2)
            is_hidden = self.hides and call == self.calls - 1
            attend = HiddenAttention.apply if is_hidden else F.scaled_dot_product_attention
            hidden = hidden + attend(heads, heads, heads).transpose(1, 2).flatten(2)
        return hidden


def train(block: Block, calls: Iterable[int], tokens: Iterable[int], way: str = "block", policy: Any = None) -> int:
    """A step for each number of calls, in which the block is a region, or a function that runs it is one.

    Returns how many were observed so far.
    """
    function = block if way == "block" else lambda hidden: block(hidden)
    for block.calls, length in zip(calls, tokens, strict=False):
        hidden = torch.randn(1, length, 16, requires_grad=True)
        fastac.checkpoint(function, hidden, policy=policy or "attn_only").sum().backward()
    return block.observed


def repeated(calls: Sequence[int]) -> Iterator[int]:
    """Of a run: as given, then the last one again."""
    return itertools.islice(itertools.chain(calls, itertools.repeat(calls[-1])), STEPS)


@pytest.mark.parametrize("way", ["block", "function"])
@pytest.mark.parametrize(
    ("calls", "most"),
    [
        *(((2, 2), 1), ((2, 3, 2), 1), ((2, 1, 2), 9), ((2, 1, 1), 2), ((3, 2, 1, 3), 2), ((1, 2, 3, 4, 5), 1)),
        ((2, 1, *[2] * 9, 1, 2, 1, 2), 9),
    ],
)
def test_calls_that_vary(calls: Any, most: int, way: str) -> None:
    """The first region, and after fewer calls the next ones until one of these makes fewer as well: at most eight."""
    assert train(Block(), repeated(calls), itertools.repeat(8), way) == most


@pytest.mark.parametrize("way", ["block", "function"])
@pytest.mark.parametrize("calls", [(2, 2), (2, 1, 2)])
def test_lengths_that_never_repeat(calls: Any, way: str) -> None:
    """After a few lengths the next is expected to make the same calls, and nothing is noted for it."""
    assert train(Block(), repeated(calls), itertools.count(8), way) == LENGTHS + 1
    assert sum(map(len, process.kinds.values())) == LENGTHS + 1


@pytest.mark.parametrize(
    ("inputs", "most"),
    [
        (lambda step: {"prompt": f"prompt {step}"}, 1),
        (lambda step: {"info": {f"sample {step}": torch.ones(1)}}, 1),
        (lambda step: {"info": [{"id": str(step)}, (1.5 * step, "video")]}, 1),
        (lambda step: {"info": [torch.randn(1, 2, 16) for _ in range(step + 1)]}, LENGTHS + 1),
        (lambda step: {"info": {f"row {n}": torch.randn(1, 2, 16) for n in range(step + 1)}}, LENGTHS + 1),
        (lambda step: {f"row {step}": torch.ones(1)}, LENGTHS + 1),
        (lambda step: {"info": [bool(step & 2**bit) for bit in range(6)]}, 3 * LENGTHS + 3),
        (lambda step: {f"flag {bit}": bool(step & 2**bit) for bit in range(9)}, 257),
    ],
    ids=["string", "key", "inside", "list that grows", "dict that grows", "keyword", "flags", "many flags"],
)
def test_inputs_that_are_new_in_each_step(inputs: Any, most: int) -> None:
    """What no op can see makes no kinds, and lengths are bounded as shapes are."""
    block = Block()
    for step in range(most + LENGTHS):
        hidden = torch.randn(1, 8, 16, requires_grad=True)
        fastac.checkpoint(block, hidden, policy="attn_only", **inputs(step)).sum().backward()
    assert 1 <= block.observed <= most


@pytest.mark.parametrize("way", ["block", "function"])
def test_attention_hidden_in_a_length_that_is_not_observed(way: str) -> None:
    """It makes fewer calls than the others: the block's next regions are observed."""
    block = Block()
    train(block, itertools.repeat(2, STEPS), itertools.count(8), way)
    block.hides = True
    train(block, [2], [99], way)
    with pytest.raises(PolicyNotAppliedError, match="HiddenAttention"):
        train(block, [2], [100], way)


def test_a_policy_of_long_attention_waits_for_long_ones() -> None:
    """What is too short to be saved says nothing of what is long enough. Shorter inputs are known by then."""
    lengths = (*range(12, 12 + LENGTHS), *range(2, 12), 24, 44, 45)
    policy = fastac.Policy("long_attn_only", min_kv=40)
    assert train(Block(), itertools.repeat(2), lengths, policy=policy) == LENGTHS + 4


def test_the_report_names_what_runs_again_at_every_length() -> None:
    """Also at lengths that were not observed."""
    model = stack(layers=1)
    neutral = hidden_function("Neutral")
    model.blocks[0].norms[0].register_forward_hook(lambda module, args, output: neutral(*[output] * 3))
    fastac.enable(model, blocks="blocks")
    inputs = stack_inputs()
    for length in range(2, LENGTHS + 5):
        train_step(model, {**inputs, "video": inputs["video"][:, :length]})
        assert any("Neutral" in name for name in fastac.report(model).rows[0].unknown), length


class Meanwhile(type):
    """Of an input's class: while a region looks its kind up, a block of the same class is trained in other ways."""

    policies: Iterator[Any] = iter(())

    def __hash__(cls) -> int:
        policies, Meanwhile.policies = Meanwhile.policies, iter(())
        for policy in itertools.islice(policies, 1):
            train(Block(), [2], [100], policy=policy)
        Meanwhile.policies = policies
        return super().__hash__()


def test_kinds_are_added_meanwhile() -> None:
    """As by other threads, which train blocks of the same class."""
    given = [Meanwhile("Given", (), {})()]
    Meanwhile.policies = (fastac.Policy(min_kv=number) for number in range(1, 99))
    for length in (8, 9):
        fastac.checkpoint(Block(), torch.randn(1, length, 16, requires_grad=True), given=given).sum().backward()
