"""Sparse attention chooses blocks of keys inside the region. A recompute that chose others would meet saved outputs of
these with indices of those: choices are kept in the order of their calls, or as arguments of the attention op.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastac
from tests import support
from tests.support import assert_region, assert_same, train_step

KEYS, CHOSEN, DIM = 12, 5, 8

Choose = Callable[[torch.Tensor], torch.Tensor]


def by_threshold(scores: torch.Tensor) -> torch.Tensor:
    ordered, indices = scores.sort(descending=True)
    return indices[: int((ordered.softmax(0).cumsum(0) < 0.8).sum()) + 1]


CHOICES: dict[str, Choose] = {
    "topk": lambda scores: scores.topk(CHOSEN).indices,
    "unsorted topk": lambda scores: torch.topk(scores, CHOSEN, sorted=False)[1],
    "sort": lambda scores: scores.sort(descending=True).indices[:CHOSEN],
    "argsort": lambda scores: scores.argsort()[:CHOSEN],
    "changed in place": lambda scores: scores[1:].topk(CHOSEN).indices.add_(1),
    "by a threshold": by_threshold,
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
    return support.custom_attention(support.new_name("sparse"))


def sparse(choose: Choose, scores: Callable[[torch.Tensor], torch.Tensor], rounds: int = 1) -> Any:
    attend = attention()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = torch.tanh(key)
        for _ in range(rounds):
            blocks = choose(scores(key))
            query = torch.tanh(attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks]))
        return query

    return region


def assert_same_as_first(region: Callable[..., Any], begin: Callable[[], object], **options: Any) -> None:
    """Two steps as without checkpointing. begin: called before each, so that it begins as the first."""

    def step(policy: Any) -> support.Tensors:
        begin()
        return train_step(functools.partial(support.run_checkpointed, region, policy=policy), inputs(), **options)

    support.assert_alike(step)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_not_made_again(choice: str, rounds: int) -> None:
    scores = Wavering()

    def twice(loss: torch.Tensor) -> None:
        calls = scores.calls
        loss.backward(retain_graph=True)
        scores.calls = calls
        loss.backward()

    region = sparse(CHOICES[choice], scores, rounds)
    assert_same_as_first(region, lambda: setattr(scores, "calls", 0), backward=twice)
    assert scores.calls == 2 * rounds, "the scores were recomputed, and came out differently"


def test_values_that_are_chosen_carry_gradients() -> None:
    """A router weighs its experts by them. They have the strides they had: what follows may add in another order."""
    attend, strides = attention(), set()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights, blocks = torch.tanh(key).mean(dim=(0, 1, 3)).topk(CHOSEN)
        ordered, order = torch.tanh(value).transpose(1, 2).sort(dim=-1)
        strides.add((ordered.stride(), order.stride()))
        chosen = ordered.transpose(1, 2)[:, :, blocks] * weights.softmax(0)[:, None]
        return torch.tanh(attend(query, torch.tanh(key)[:, :, blocks], chosen))

    assert_region(region, inputs())
    assert len(strides) == 1


@pytest.mark.parametrize("choice", ["topk", "argsort", "by a threshold"])
def test_a_choice_under_full(choice: str) -> None:
    """Is made again, and compared. The error names it, and the policy that keeps it."""
    with pytest.raises(fastac.FastacError, match=r'\((topk|sort)\) again.* policy="attn_only" keeps') as raised:
        assert_region(sparse(CHOICES[choice], Wavering()), inputs(), policy="full")
    assert "whole numbers differ" in str(raised.value) or choice == "by a threshold"
    assert len(str(raised.value).splitlines()) <= 5


CHOSEN_BY: dict[str, Choose] = {
    "topk": lambda scores: scores.topk(2).indices,
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "sorted numbers": lambda scores: scores.argmax(-1, keepdim=True).sort(1).values,
}


class Router(torch.nn.Module):
    """Two of three experts for each token, by scores that waver. It has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(support.WIDTH, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(support.WIDTH, support.WIDTH) for _ in range(3))
        self.choose = CHOSEN_BY["topk"]
        self.noise, self.calls = 0.0, 0

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = self.gate(video)
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(self.calls)) * self.noise
        chosen, output = self.choose((scores + noise).detach()), torch.zeros_like(video)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).any(-1)[0].nonzero()[:, 0]
            output = output.index_add(1, tokens, expert(video[:, tokens]).tanh())
        return output


def routers(policy: Any) -> Any:
    model = support.stack(block=Router)
    fastac.enable(model, policy, blocks="blocks")
    return model


@pytest.mark.parametrize("choice", CHOSEN_BY)
@pytest.mark.parametrize("step", [0, 3], ids=["compared", "not compared"])
def test_a_router_under_full(step: int, choice: str) -> None:
    """In any step. What no policy keeps is not named, nor what was chosen elsewhere."""
    model = routers("full")
    for block in model.blocks:
        block.choose = CHOSEN_BY[choice]
    for _ in range(step):
        train_step(model, support.stack_inputs())
    for block in model.blocks:
        block.noise = 10.0
    loss = support.loss_of(model(**support.stack_inputs()))
    torch.rand(4).topk(2)
    with pytest.raises(fastac.FastacError) as raised:
        loss.backward()
    assert ("makes its choices (topk) again" in str(raised.value)) == (choice == "topk")
    assert ("makes its choices" in str(raised.value)) == (choice == "topk")


def test_a_router_under_the_policy_that_the_error_names() -> None:
    """Without attention attn_only has nothing to save, and says so."""

    def step(policy: Any) -> support.Tensors:
        model = routers(policy)
        for block in model.blocks:
            block.noise, block.calls = 10.0, 0
        return train_step(model, support.stack_inputs())

    assert_same(step(fastac.Policy("linear_only", linear=("gate",))), step("none"))
    with pytest.raises(fastac.PolicyNotAppliedError, match="no attention is saved"):
        step("attn_only")


def test_bytes_of_choices_are_reported_apart() -> None:
    class Sparse(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            blocks = video.mean(dim=(0, 2)).topk(CHOSEN).indices
            return super().forward(video, text[:, : int(blocks.numel())])

    model = support.stack(block=Sparse)
    fastac.enable(model, blocks="blocks")
    train_step(model, support.stack_inputs())
    assert fastac.report(model).rows[0].choice_bytes > 0
    assert "choices" in str(fastac.report(model))


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
    row = fastac.AttentionOp(
        backend="tests",
        namespace="fastac_tests",
        name=name,
        key="k",
        layout="bhsd",
        dropout=None,
        selection=("blocks",),
        coarse="sizes",
    )
    fastac.register(row)
    return op


class ChosenOutside:
    """A region whose choice is made by nothing the dispatcher shows: one of these after another."""

    def __init__(self, *choices: torch.Tensor) -> None:
        self.op, self.choices = sparse_op(support.new_name("chosen")), choices
        self.begin()

    def begin(self) -> None:
        self.next: Iterator[torch.Tensor] = itertools.chain(self.choices, itertools.repeat(self.choices[-1]))

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = next(self.next).clone()
        return torch.tanh(self.op(torch.tanh(query), torch.tanh(key), value, blocks, torch.ones(3))[0])


@pytest.mark.parametrize("expanded", [False, True], ids=["", "one memory for several heads"])
def test_an_argument_that_holds_the_choice(expanded: bool, counted: Any) -> None:
    choices = torch.tensor([0, 3, 7]), torch.tensor([1, 2, 11])
    region = ChosenOutside(*(one[:1].expand(3) if expanded else one for one in choices))
    assert_same_as_first(region, region.begin)
    assert list(counted.values()) == [3], "without checkpointing and in two steps, once each"


def test_a_choice_of_another_size_is_an_error() -> None:
    region = ChosenOutside(torch.tensor([0, 3, 7]), torch.tensor([1, 2]))
    with pytest.raises(fastac.FastacError, match=r"\(2,\).*\(3,\)"):
        train_step(functools.partial(fastac.checkpoint, region), inputs())


def test_sparse_calls_of_which_only_some_are_saved() -> None:
    """Each call gets its own table back, a call that is recomputed none; one that is not chosen here is not written."""
    op, short, long = sparse_op(support.new_name("some")), torch.tensor([0, 1]), torch.tensor([0, 3, 7])

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], short.clone(), torch.ones(3))[0]
        query = op(torch.tanh(query), torch.tanh(key), value, long, torch.ones(3))[0]
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], (short + 1).clone(), torch.ones(3))[0]
        return torch.tanh(query)

    version = long._version
    assert_region(region, inputs(), policy=fastac.Policy("attn_only", min_kv=8))
    assert long._version == version


@pytest.mark.parametrize(
    ("blocks", "claimed", "sparse_too", "legal"),
    [(4, 4, True, True), (4, 8, True, True), (5, 4, True, False), (4, 6, True, False), (4, 4, False, False)],
    ids=["as many", "padded", "more", "fewer", "alone"],
)
def test_coarse_attention_is_recomputed(blocks: int, claimed: int, sparse_too: bool, legal: bool, counted: Any) -> None:
    """Attention in small ops over one key per block, next to sparse attention over as many blocks as it claims."""
    op = sparse_op(support.new_name("coarse"))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = torch.tanh(key)[:, :, :blocks], torch.tanh(value)[:, :, :blocks]
        output = (torch.tanh(query) @ keys.transpose(-1, -2)).softmax(-1) @ values
        if sparse_too:
            output = output + op(torch.tanh(query), key, value, torch.tensor([0, 3]), torch.ones(claimed))[0]
        return torch.tanh(output)

    if legal:
        assert_region(region, inputs(), counted)
    else:
        with pytest.raises(fastac.PolicyNotAppliedError, match=f"over {blocks} keys"):
            train_step(functools.partial(fastac.checkpoint, region), inputs())
