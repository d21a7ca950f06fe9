"""Sparse attention chooses blocks of keys inside the region: a recompute that chose others would meet saved outputs of
these with indices of those. Choices are kept in the order of their calls, or as arguments of the attention op.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastac
from tests import support
from tests.support import assert_same, train_step

KEYS, CHOSEN, DIM = 12, 5, 8

Choose = Callable[[torch.Tensor], torch.Tensor]

CHOICES: dict[str, Choose] = {
    "topk": lambda scores: scores.topk(CHOSEN).indices,
    "unsorted topk": lambda scores: torch.topk(scores, CHOSEN, sorted=False)[1],
    "sort": lambda scores: scores.sort(descending=True).indices[:CHOSEN],
    "argsort": lambda scores: scores.argsort()[:CHOSEN],
    "changed in place": lambda scores: scores[1:].topk(CHOSEN).indices.add_(1),
}


class Wavering:
    """Scores of keys that differ from call to call, as those of a kernel may that does not repeat itself exactly."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, key: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noise = torch.randn(KEYS, generator=torch.Generator().manual_seed(self.calls))
        return key.mean(dim=(0, 1, 3)) + noise


def inputs() -> dict[str, torch.Tensor]:
    return support.attention_inputs(7, KEYS, dim=DIM)


def attention() -> Callable[..., torch.Tensor]:
    return support.custom_attention(f"sparse_{uuid.uuid4().hex[:8]}")


def sparse(choose: Choose, scores: Callable[[torch.Tensor], torch.Tensor], rounds: int = 1) -> Any:
    """A region that attends, so many times, to the keys it chooses."""
    attend = attention()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = torch.tanh(key)
        for _ in range(rounds):
            blocks = choose(scores(key))
            query = torch.tanh(attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks]))
        return query

    return region


def assert_exact(
    region: Callable[..., Any], again: Callable[[], object] = lambda: None, policy: Any = "attn_only"
) -> None:
    """Two steps as without checkpointing. again: called before each, so that it begins as the first."""
    data = inputs()
    reference = train_step(region, data)
    for _ in range(2):
        again()
        assert_same(train_step(functools.partial(fastac.checkpoint, region, policy=policy), data), reference)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_not_made_again(choice: str, rounds: int) -> None:
    scores = Wavering()
    assert_exact(sparse(CHOICES[choice], scores, rounds), lambda: setattr(scores, "calls", 0))
    assert scores.calls == 2 * rounds, "the scores were recomputed, and came out differently"


def by_threshold(values: torch.Tensor) -> torch.Tensor:
    ordered, indices = values.sort(descending=True)
    return indices[: int((ordered.softmax(0).cumsum(0) < 0.8).sum()) + 1]


def test_how_many_are_chosen_by_a_threshold_is_not_decided_again() -> None:
    scores = Wavering()
    assert_exact(sparse(by_threshold, scores), lambda: setattr(scores, "calls", 0))
    assert scores.calls == 2


def test_values_that_are_chosen_carry_gradients() -> None:
    """A router weighs its experts by them. They have the strides they had: what follows may add in another order."""
    attend, strides = attention(), []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights, blocks = torch.tanh(key).mean(dim=(0, 1, 3)).topk(CHOSEN)
        ordered, order = torch.tanh(value).transpose(1, 2).sort(dim=-1)
        strides.append((ordered.stride(), order.stride()))
        chosen = ordered.transpose(1, 2)[:, :, blocks] * weights.softmax(0)[:, None]
        return torch.tanh(attend(query, torch.tanh(key)[:, :, blocks], chosen))

    assert_exact(region)
    assert len(set(strides)) == 1


def test_choices_in_regions_inside_regions() -> None:
    """An inner region asks the outer one, which may be recomputing, and holds the choice."""
    scores = Wavering()
    inner = sparse(by_threshold, scores)

    def region(checkpoint: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = query + checkpoint(inner, query, key, value)
        return torch.tanh(query) + checkpoint(inner, query, key, value)

    data = inputs()
    reference = train_step(lambda **named: region(lambda function, *args: function(*args), *named.values()), data)
    scores.calls = 0
    outer = functools.partial(region, fastac.checkpoint)
    assert_same(train_step(lambda **named: fastac.checkpoint(outer, *named.values()), data), reference)
    assert scores.calls > 2


def test_a_choice_outside_regions_and_under_full() -> None:
    scores = Wavering()
    region, data = sparse(CHOICES["topk"], scores), inputs()
    train_step(functools.partial(support.run_checkpointed, region, policy="none"), data)
    with pytest.raises(fastac.FastacError, match="whole numbers differ"):
        train_step(functools.partial(support.run_checkpointed, region, policy="full"), data)
    assert scores.calls == 3


def test_a_second_backward_through_a_choice() -> None:
    region, data = sparse(CHOICES["topk"], Wavering()), inputs()
    output = fastac.checkpoint(region, *data.values())
    grads = [torch.autograd.grad(output.sum(), list(data.values()), retain_graph=True) for _ in range(3)]
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other, strict=True))


@pytest.mark.parametrize("way", ["other order", "more", "fewer"])
def test_a_recompute_that_chooses_on_another_path(way: str) -> None:
    """Choices are told apart by the order of their calls alone: anything else is an error, not a guess."""
    attend, runs = attention(), []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs.append(way)
        again = len(runs) > 1
        scores = torch.tanh(key).mean(dim=(0, 1, 3)).detach()
        choices = [lambda: scores.topk(CHOSEN).indices, lambda: scores.sort().indices[:CHOSEN]]
        if again and way == "other order":
            choices.reverse()
        elif again and way == "more":
            choices.insert(0, lambda: scores[1:].topk(2).indices)
        elif again:
            choices.pop(0)
        blocks = [choose() for choose in choices][-1]
        return torch.tanh(attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks]))

    output = fastac.checkpoint(region, *inputs().values())
    with pytest.raises(fastac.FastacError, match=r"chose|choice|topk|sort"):
        output.sum().backward()


def test_bytes_of_choices_are_reported_apart() -> None:
    class Sparse(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            blocks = video.mean(dim=(0, 2)).topk(CHOSEN).indices
            return super().forward(video, text[:, : int(blocks.numel())])

    model = support.stack(block=Sparse)
    for policy in ("attn_only", "full"):
        fastac.enable(model, policy, blocks="blocks")
        train_step(model, support.stack_inputs())
        report = fastac.report(model)
        (row,) = report.rows
        assert (row.choice_bytes > 0) == (policy == "attn_only")
        assert ("choices" in str(report)) == (policy == "attn_only")


# A choice that comes into the attention op as an argument


def sparse_op(name: str) -> Callable[..., torch.Tensor]:
    """An op (q, k, v, blocks, sizes) with its autograd formula, and a row that says what its arguments are."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        support.executions[f"fastac_tests::{name}"] += 1
        return support.attention_math(q, k[:, :, blocks], v[:, :, blocks])

    schema = "(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor sizes) -> (Tensor, Tensor)"
    op = torch.library.custom_op(f"fastac_tests::{name}", forward, mutates_args=(), schema=schema)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *output)

    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        q, k, v, blocks, output, statistics = ctx.saved_tensors
        grads = support.attention_math_backward(grad, q, k[:, :, blocks], v[:, :, blocks], output, statistics)
        whole = [torch.zeros_like(t).index_add(2, blocks, g) for t, g in zip((k, v), grads[1:], strict=True)]
        return grads[0], *whole, None, None

    op.register_autograd(backward, setup_context=setup)
    fastac.register(
        fastac.AttentionOp(
            backend="tests",
            namespace="fastac_tests",
            name=name,
            key="k",
            layout="bhsd",
            dropout=None,
            selection=("blocks",),
            coarse="sizes",
        )
    )
    return op


def chosen_outside(*choices: torch.Tensor) -> tuple[Any, Callable[[], object]]:
    """A region whose choice is made by nothing the dispatcher shows: one after another. And how to begin anew."""
    op, calls = sparse_op(f"chosen_{uuid.uuid4().hex[:8]}"), [0]

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = choices[min(calls[0], len(choices) - 1)]
        calls[0] += 1
        return torch.tanh(op(torch.tanh(query), torch.tanh(key), value, blocks.clone(), torch.ones(3))[0])

    return region, lambda: calls.__setitem__(0, 0)


@pytest.mark.parametrize("expanded", [False, True], ids=["", "one memory for several heads"])
def test_an_argument_that_holds_the_choice(expanded: bool, counted: Any) -> None:
    first, second = torch.tensor([0, 3, 7]), torch.tensor([1, 2, 11])
    if expanded:
        first, second = first[:1].expand(3), second[:1].expand(3)
    region, again = chosen_outside(first, second)
    assert_exact(region, again)
    assert list(counted.values()) == [3], "without checkpointing and in two steps, once each"


def test_a_choice_of_another_size_is_an_error() -> None:
    region, _ = chosen_outside(torch.tensor([0, 3, 7]), torch.tensor([1, 2]))
    with pytest.raises(fastac.FastacError, match=r"\(2,\).*\(3,\)"):
        train_step(functools.partial(fastac.checkpoint, region), inputs())


def test_sparse_calls_of_which_only_some_are_saved() -> None:
    """Each call gets its own table back, a call that is recomputed none; one that is not chosen here is not written."""
    op, short, long = sparse_op(f"some_{uuid.uuid4().hex[:8]}"), torch.tensor([0, 1]), torch.tensor([0, 3, 7])

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], short.clone(), torch.ones(3))[0]
        query = op(torch.tanh(query), torch.tanh(key), value, long, torch.ones(3))[0]
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], (short + 1).clone(), torch.ones(3))[0]
        return torch.tanh(query)

    version = long._version
    assert_exact(region, policy=fastac.Policy("attn_only", min_kv=8))
    assert long._version == version


@pytest.mark.parametrize(
    ("blocks", "claimed", "sparse_too", "legal"),
    [(4, 4, True, True), (4, 8, True, True), (5, 4, True, False), (4, 6, True, False), (4, 4, False, False)],
    ids=["as many", "padded", "more", "fewer", "alone"],
)
def test_coarse_attention_is_recomputed(blocks: int, claimed: int, sparse_too: bool, legal: bool, counted: Any) -> None:
    """Attention in small ops over one key per block, beside the sparse one that is told of so many blocks."""
    op = sparse_op(f"coarse_{uuid.uuid4().hex[:8]}")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = torch.tanh(key)[:, :, :blocks], torch.tanh(value)[:, :, :blocks]
        output = (torch.tanh(query) @ keys.transpose(-1, -2)).softmax(-1) @ values
        if sparse_too:
            output = output + op(torch.tanh(query), key, value, torch.tensor([0, 3]), torch.ones(claimed))[0]
        return torch.tanh(output)

    if legal:
        assert_exact(region)
        assert list(counted.values()) == [3]
    else:
        with pytest.raises(fastac.PolicyNotAppliedError, match=f"over {blocks} keys"):
            train_step(functools.partial(fastac.checkpoint, region), inputs())
