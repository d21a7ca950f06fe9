"""Sparse attention: what it chooses its blocks by is saved with its outputs, and the coarse attention it has beside."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastac
from fastac import census, registry
from fastac.backends import selection
from fastac.choices import Choice
from fastac.policy import Policy
from tests import support
from tests.support import assert_same, train_step

KEYS, CHOSEN, DIM = 12, 5, 8

ENGINES = pytest.mark.parametrize("engine", ["tape", "sac"])

CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": lambda scores: scores.topk(CHOSEN).indices,
    "unsorted topk": lambda scores: torch.topk(scores, CHOSEN, sorted=False)[1],
    "sort": lambda scores: scores.sort(descending=True).indices[:CHOSEN],
    "stable sort": lambda scores: torch.sort(scores, stable=True)[1][-CHOSEN:],
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


def sparse(choose: Callable[[torch.Tensor], torch.Tensor], scores: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A region that attends to the keys it chooses."""
    attend = support.custom_attention(f"sparse_{uuid.uuid4().hex[:8]}")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = torch.tanh(query), torch.tanh(key)
        blocks = choose(scores(key))
        return torch.tanh(attend(query, key[:, :, blocks], value[:, :, blocks]))

    return region


@ENGINES
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_not_made_again(choice: str, engine: str) -> None:
    scores = Wavering()
    region, data = sparse(CHOICES[choice], scores), inputs()
    reference = train_step(region, data)
    for _ in range(2):
        scores.calls = 0
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
        assert scores.calls == 2, "the scores were recomputed, and came out differently"


@pytest.fixture
def _without_rows(rows_as_before: None) -> None:
    registry._rows[:] = [row for row in registry._rows if row not in selection.ROWS]
    registry._decisions.clear()


@pytest.mark.usefixtures("_without_rows")
def test_without_the_rows_it_is() -> None:
    """So the test above would fail: torch's selective checkpointing, which asks the registry, chooses again."""
    scores = Wavering()
    region, data = sparse(CHOICES["topk"], scores), inputs()
    reference = train_step(region, data)
    scores.calls = 0
    found = train_step(functools.partial(fastac.checkpoint, region, engine="sac"), data)
    wrong = max(support.relative_error(found[name], reference[name]) for name in reference)
    assert wrong > 0.1


@ENGINES
def test_values_that_are_chosen_carry_gradients(engine: str) -> None:
    """The values of a top-k are differentiable: a router weighs its experts by them."""
    attend = support.custom_attention(f"weighed_{uuid.uuid4().hex[:8]}")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights, blocks = torch.tanh(key).mean(dim=(0, 1, 3)).topk(CHOSEN)
        ordered, _ = torch.tanh(value).sort(dim=-1)
        chosen = ordered[:, :, blocks] * weights.softmax(0)[:, None]
        return torch.tanh(attend(query, torch.tanh(key)[:, :, blocks], chosen))

    data = inputs()
    reference = train_step(region, data)
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only", "full"])
def test_bytes_of_choices_are_reported_apart(policy: str, engine: str) -> None:
    class Sparse(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            blocks = video.mean(dim=(0, 2)).topk(CHOSEN).indices
            return super().forward(video, text[:, : int(blocks.numel())])

    model = support.stack(layers=2, policy=policy, engine=engine, block=Sparse)
    train_step(model, support.stack_inputs())
    with support.reported_blocks({f"blocks.{i}": block for i, block in enumerate(model.blocks)}):
        report = fastac.report(model)
    row = report.rows[0]
    assert row.selection_bytes == (0 if policy == "full" else 2 * CHOSEN * 2), "indices as int16, of two blocks"
    assert (row.attention_calls, row.saved) == {"attn_only": (4, 4), "long_attn_only": (4, 0), "full": (0, 0)}[policy]
    assert ("choices)" in str(report)) == (policy != "full")


# A choice that comes into the attention op as an argument


@functools.cache
def _sparse_op(name: str, row: bool = True) -> Callable[..., torch.Tensor]:
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
    if row:
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


def chosen_outside(choices: list[torch.Tensor], name: str) -> Any:
    """A region whose choice is made by nothing the dispatcher shows: the first of `choices`, then the next."""
    op, calls = _sparse_op(name), itertools.count()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = choices[min(next(calls), len(choices) - 1)].clone()
        return torch.tanh(op(torch.tanh(query), torch.tanh(key), value, blocks, torch.ones(3))[0])

    return region


@ENGINES
def test_an_argument_that_holds_the_choice_is_kept(engine: str) -> None:
    name = f"chosen_{uuid.uuid4().hex[:8]}"
    first, second = torch.tensor([0, 3, 7]), torch.tensor([1, 2, 11])
    data = inputs()
    reference = train_step(chosen_outside([first], name), data)
    region = chosen_outside([first, second], name)
    support.executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert support.executions == {f"fastac_tests::{name}": 1}


@ENGINES
def test_a_choice_of_another_size_is_an_error(engine: str) -> None:
    region = chosen_outside([torch.tensor([0, 3, 7]), torch.tensor([1, 2])], f"sized_{uuid.uuid4().hex[:8]}")
    with pytest.raises(fastac.FastacError, match=r"chose other blocks .* \(2,\) where there was one of \(3,\)"):
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs())


def test_bytes_of_the_argument_count() -> None:
    """Held for the block: the output, the statistics and the choice."""
    seen: list[Any] = []
    census.listeners.append(seen.append)
    try:
        region = chosen_outside([torch.tensor([0, 3, 7])], f"counted_{uuid.uuid4().hex[:8]}")
        train_step(functools.partial(fastac.checkpoint, region), inputs())
    finally:
        census.listeners.clear()
    (call,) = seen[0].calls
    assert call.saved_bytes == 2 * 3 * 7 * (DIM + 1) * 4 + 3 * 8


# The coarse attention that goes with it


def coarse(name: str, blocks: int, claimed: int, sparse_too: bool = True) -> Any:
    """Attention in small ops over one key per block, and the sparse one, told of so many blocks."""
    op = _sparse_op(name)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = torch.tanh(key)[:, :, :blocks], torch.tanh(value)[:, :, :blocks]
        probabilities = (torch.tanh(query) @ keys.transpose(-1, -2)).softmax(-1)
        output = probabilities @ values
        if sparse_too:
            output = output + op(torch.tanh(query), key, value, torch.tensor([0, 3]), torch.ones(claimed))[0]
        return torch.tanh(output)

    return region


@ENGINES
@pytest.mark.parametrize("claimed", [4, 8, 16])
def test_coarse_attention_is_recomputed(claimed: int, engine: str) -> None:
    name = f"coarse_{uuid.uuid4().hex[:8]}"
    region, data = coarse(name, 4, claimed), inputs()
    reference = train_step(region, data)
    support.executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert support.executions == {f"fastac_tests::{name}": 1}


@ENGINES
@pytest.mark.parametrize(
    ("blocks", "claimed", "sparse_too"), [(5, 4, True), (4, 6, True), (4, 4, False)], ids=["more", "fewer", "alone"]
)
def test_other_attention_in_small_ops_is_still_an_error(
    blocks: int, claimed: int, sparse_too: bool, engine: str
) -> None:
    region = coarse(f"not_coarse_{uuid.uuid4().hex[:8]}", blocks, claimed, sparse_too)
    with pytest.raises(fastac.PolicyNotAppliedError, match=f"over {blocks} keys ran as small ops"):
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs())


def test_coarse_attention_in_a_compiled_graph() -> None:
    name = f"coarse_{uuid.uuid4().hex[:8]}"
    data = inputs()
    for blocks, raises in ((4, False), (5, True)):
        torch._dynamo.reset()
        region = torch.compile(functools.partial(fastac.checkpoint, coarse(name, blocks, 4)), backend="aot_eager")
        _fake(name)
        if raises:
            with pytest.raises(fastac.PolicyNotAppliedError, match="ran as small ops"):
                train_step(region, data)
        else:
            support.executions.clear()
            train_step(region, data)
            assert support.executions == {f"fastac_tests::{name}": 1}


@functools.cache
def _fake(name: str) -> None:
    @torch.library.register_fake(f"fastac_tests::{name}")
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, sizes: torch.Tensor) -> Any:
        return torch.empty_like(q), q.new_empty(q.shape[:-1])

    with FakeTensorMode():
        assert torch.empty(1) is not None


def test_a_choice_is_made_as_ever_outside_regions_and_under_full() -> None:
    scores = Wavering()
    region, data = sparse(CHOICES["topk"], scores), inputs()
    for policy in ("none", "full"):
        train_step(functools.partial(support.run_checkpointed, region, policy=policy), data)
    assert scores.calls == 3
    assert Policy("full").saves(10**6) is False


@ENGINES
def test_how_many_are_chosen_by_a_threshold_is_not_decided_again(engine: str) -> None:
    scores, counts = Wavering(), []

    def choose(values: torch.Tensor) -> torch.Tensor:
        ordered, indices = values.sort(descending=True)
        counts.append(int((ordered.softmax(0).cumsum(0) < 0.8).sum()) + 1)
        return indices[: counts[-1]]

    region, data = sparse(choose, scores), inputs()
    reference = train_step(region, data)
    scores.calls = 0
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert counts == [counts[0]] * 3
    assert scores.calls == 2


def test_regions_inside_regions() -> None:
    """An inner region asks the outer one, which may be recomputing, and holds the choice: how many, as well."""
    scores = Wavering()

    def choose(values: torch.Tensor) -> torch.Tensor:
        ordered, indices = values.sort(descending=True)
        return indices[: int((ordered.softmax(0).cumsum(0) < 0.8).sum()) + 1]

    inner, data = sparse(choose, scores), inputs()

    def outer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = query + fastac.checkpoint(inner, query, key, value)
        return torch.tanh(query) + fastac.checkpoint(inner, query, key, value)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = query + inner(query, key, value)
        return torch.tanh(query) + inner(query, key, value)

    reference = train_step(plain, data)
    scores.calls = 0
    assert_same(train_step(functools.partial(fastac.checkpoint, outer), data), reference)
    assert scores.calls > 2


def test_what_two_inner_regions_choose() -> None:
    """They are two places of the outer region, whose recompute needs both choices."""
    scores = Wavering()

    def inner(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = scores(torch.tanh(key)).topk(CHOSEN).indices
        return query * torch.tanh(value[:, :, blocks]).sum()

    def outer(inner: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = torch.tanh(inner(query, key, value))
        query = torch.tanh(inner(query, key, value))
        return query * torch.tanh(query)

    data = inputs()
    reference = train_step(functools.partial(outer, inner), data)
    scores.calls = 0
    checkpointed = functools.partial(outer, functools.partial(fastac.checkpoint, inner))
    assert_same(train_step(functools.partial(fastac.checkpoint, checkpointed), data), reference)
    assert scores.calls > 2


@ENGINES
def test_choices_of_a_loop_that_differ_in_what_they_ask(engine: str) -> None:
    """So many, then fewer: told apart, and kept whatever the recomputed numbers are."""
    scores = Wavering()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for count in (CHOSEN, CHOSEN - 1):
            blocks = scores(torch.tanh(key)).topk(count).indices
            query = torch.tanh(query * value[:, :, blocks].sum())
        return query * torch.tanh(query)

    data = inputs()
    reference = train_step(region, data)
    scores.calls = 0
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert scores.calls == 4


@ENGINES
def test_values_of_a_topk_are_compared_with_what_they_came_from(engine: str) -> None:
    """MoBA's way: all keys whose score is at least the last of the top-k. A hair's breadth must not matter."""
    calls: list[int] = []

    def scores(key: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return key.mean(dim=(0, 1, 3)) * (1 + 1e-6 * (len(calls) - 1))

    def choose(values: torch.Tensor) -> torch.Tensor:
        return (values >= values.topk(CHOSEN).values[-1:]).nonzero().flatten()

    region, data = sparse(choose, scores), inputs()
    reference = train_step(region, data)
    calls.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert len(calls) == 2


# Choices that recompute does not make again


@ENGINES
@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_choice_that_is_made_once_and_kept(which: str, engine: str) -> None:
    """A mask or an order that the first call makes and caches: plain checkpointing allows it."""
    attend = support.custom_attention(f"cached_{uuid.uuid4().hex[:8]}")
    cache: dict[str, torch.Tensor] = {}
    scores = Wavering()

    def cached() -> torch.Tensor:
        if "order" not in cache:
            cache["order"] = torch.linspace(1, 0, KEYS).sort().indices
        return cache["order"]

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        order = cached() if which == "first" else None
        first = scores(torch.tanh(key)).sort().indices[:CHOSEN]
        order = cached() if which == "middle" else order
        second = scores(torch.tanh(key)).sort().indices[:CHOSEN]
        order = cached() if which == "last" else order
        output = attend(torch.tanh(query), key[:, :, order[first]], value[:, :, second])
        return torch.tanh(output)

    data = inputs()
    reference = train_step(region, data)
    for _ in range(2):
        cache.clear()
        scores.calls = 0
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)


def test_a_choice_that_only_recompute_makes() -> None:
    attend = support.custom_attention(f"late_choice_{uuid.uuid4().hex[:8]}")
    runs: list[int] = []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > 1:
            torch.rand(5).topk(2)
        return torch.tanh(attend(torch.tanh(query), key, value))

    data = inputs()
    reference = train_step(region, data)
    runs.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), data), reference)


def test_whole_numbers_are_sorted_again() -> None:
    """They repeat themselves: a block mask sorts many, and holds none of them."""
    seen: list[Any] = []
    census.listeners.append(seen.append)
    try:
        attend = support.custom_attention(f"sorts_{uuid.uuid4().hex[:8]}")

        def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            order = torch.arange(KEYS, 0, -1).sort().indices
            return torch.tanh(attend(torch.tanh(query), key[:, :, order], value))

        train_step(functools.partial(fastac.checkpoint, region), inputs())
    finally:
        census.listeners.clear()
    assert seen[0].selection_bytes == 0


@pytest.mark.parametrize(("entries", "each"), [(32_767, 2), (32_768, 4)])
def test_indices_are_held_as_small_as_they_can_be(entries: int, each: int) -> None:
    seen: list[Any] = []
    census.listeners.append(seen.append)
    scores = torch.rand(entries, generator=torch.Generator().manual_seed(0)).requires_grad_()
    data = {"scores": scores}

    def region(scores: torch.Tensor) -> torch.Tensor:
        values, indices = torch.tanh(scores).sort(descending=True)
        return torch.tanh(values) * indices

    reference = train_step(region, data)
    try:
        assert_same(train_step(functools.partial(fastac.checkpoint, region), data), reference)
    finally:
        census.listeners.clear()
    assert seen[0].selection_bytes == entries * (4 + each)


@ENGINES
@pytest.mark.parametrize("choose", [lambda t: t.sort(dim=1), lambda t: t.topk(KEYS, dim=1)], ids=["sort", "topk"])
def test_values_have_the_strides_they_had(choose: Callable[..., Any], engine: str) -> None:
    """What comes after may sum them in another order otherwise."""
    strides: list[tuple[int, ...]] = []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        values, indices = choose(torch.tanh(key).permute(0, 2, 3, 1))
        strides.append((values.stride(), indices.stride()))
        return torch.tanh(values.mean(dim=(1, 2, 3))) * query[..., 0, 0].sum()

    train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs())
    assert len(strides) == 2
    assert strides[0] == strides[1]


def test_a_second_backward_through_a_choice() -> None:
    scores = Wavering()
    region, data = sparse(CHOICES["topk"], scores), inputs()
    output = fastac.checkpoint(region, *data.values())
    grads = [torch.autograd.grad(output.sum(), list(data.values()), retain_graph=True) for _ in range(3)]
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other, strict=True))


# Tables of the user's own


@ENGINES
def test_sparse_calls_of_which_only_some_are_saved(engine: str) -> None:
    """Each call gets its own table back, a call that is recomputed none."""
    op = _sparse_op(f"some_{uuid.uuid4().hex[:8]}")
    short, long = torch.tensor([0, 1]), torch.tensor([0, 3, 7])

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], short.clone(), torch.ones(3))[0]
        query = op(torch.tanh(query), torch.tanh(key), value, long.clone(), torch.ones(3))[0]
        query = op(torch.tanh(query), key[:, :, :4], value[:, :, :4], (short + 1).clone(), torch.ones(3))[0]
        return torch.tanh(query)

    data = inputs()
    reference = train_step(region, data)
    policy = Policy("attn_only", min_kv=8)
    found = train_step(functools.partial(fastac.checkpoint, region, policy=policy, engine=engine), data)
    assert_same(found, reference)


@ENGINES
def test_a_table_that_is_not_chosen_in_the_region_is_left_alone(engine: str) -> None:
    op = _sparse_op(f"kept_{uuid.uuid4().hex[:8]}")
    table = torch.tensor([0, 3, 7])

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(op(torch.tanh(query), torch.tanh(key), value, table, torch.ones(3))[0])

    data = inputs()
    reference = train_step(region, data)
    version = table._version
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert table._version == version


@ENGINES
def test_a_table_that_is_expanded(engine: str) -> None:
    """One memory for several heads: it can be written once only."""
    name = f"expanded_{uuid.uuid4().hex[:8]}"
    first, second = torch.tensor([[3], [5]]).expand(2, 3)[1], torch.tensor([[2], [7]]).expand(2, 3)[1]
    assert first.stride() == (0,)
    op, calls = _sparse_op(name), itertools.count()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = (first, second)[next(calls) > 0][:1].clone().expand(3)
        return torch.tanh(op(torch.tanh(query), torch.tanh(key), value, blocks, torch.ones(3))[0])

    data = inputs()
    reference = train_step(region, data)
    calls = itertools.count()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)


def test_a_choice_in_another_thread_is_no_attention() -> None:
    attend = support.custom_attention(f"threaded_{uuid.uuid4().hex[:8]}")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: torch.tanh(key).topk(2)).result()
        return torch.tanh(attend(torch.tanh(query), key, value))

    train_step(functools.partial(fastac.checkpoint, region), inputs())


def shared_helper(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(CHOSEN).indices


@functools.lru_cache(maxsize=1)
def cached_mask(shift: int) -> torch.Tensor:
    return shared_helper(torch.linspace(1, 0, KEYS).roll(shift))


@pytest.mark.parametrize(
    ("evicted", "engine"),
    [(False, "tape"), (False, "sac"), (True, "tape")],  # torch's selective checkpointing allows no more ops than before
)
def test_a_cached_choice_and_another_by_one_helper(evicted: bool, engine: str) -> None:
    """Told apart by where the helper was called from. A choice that is made again must not come to the other's."""
    attend = support.custom_attention(f"helper_{uuid.uuid4().hex[:8]}")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = cached_mask(0)
        own = shared_helper(torch.tanh(key).mean(dim=(0, 1, 3)))
        return torch.tanh(attend(torch.tanh(query), key[:, :, own], value[:, :, mask]))

    def backward(loss: torch.Tensor) -> None:
        if evicted:
            cached_mask(1)
        loss.backward()

    data = inputs()
    reference = train_step(region, data)
    cached_mask.cache_clear()
    if evicted:
        cached_mask(0)
    assert_same(
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), data, backward=backward), reference
    )
    assert cached_mask(0).tolist() == list(range(CHOSEN))


@ENGINES
@pytest.mark.parametrize("cached", [0, 1])
def test_choices_of_a_loop_of_which_one_is_cached(cached: int, engine: str) -> None:
    """They can not be told apart by where they were made: what does not fit the numbers is chosen again."""
    attend = support.custom_attention(f"loop_{uuid.uuid4().hex[:8]}")
    cache: dict[int, torch.Tensor] = {}

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh(key).mean(dim=(0, 1, 3)).detach()
        for i in range(2):
            if i not in cache:
                blocks = (scores * (1, -2)[i]).topk(CHOSEN, sorted=False).indices
                if i == cached:
                    cache[i] = blocks
            blocks = cache[i] if i == cached else blocks
            query = attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks])
        return torch.tanh(query)

    data = inputs()
    reference = train_step(region, data)
    cache.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)


@ENGINES
@pytest.mark.parametrize("choice", CHOICES)
def test_choices_of_a_loop_that_come_out_a_little_different(choice: str, engine: str) -> None:
    """Keys with nearly equal scores: noise decides between them, and recompute must not decide again."""
    attend = support.custom_attention(f"noisy_{uuid.uuid4().hex[:8]}")
    calls: list[int] = []

    def scores(part: int) -> torch.Tensor:
        calls.append(1)
        noise = torch.randn(KEYS, generator=torch.Generator().manual_seed(len(calls)))
        levels = torch.linspace(-1, 1, KEYS).gt(0) if "sort" not in choice else torch.zeros(KEYS)
        return levels + part + 1 + noise * 1e-4

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            blocks = CHOICES[choice](scores(i))
            query = attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks])
        return torch.tanh(query)

    data = inputs()
    reference = train_step(region, data)
    calls.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert len(calls) == 4


INFINITY, NAN = float("inf"), float("nan")

FITS = {
    "the same": ([3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 0.0], True),
    "noise decides": ([3.0, 2.0, 2.001, 0.0], [3.0, 2.001, 2.0, 0.0], True),
    "another": ([3.0, 1.0, 2.0, 0.0], [0.0, 3.0, 1.0, 2.0], False),
    "the same, masked": ([3.0, -INFINITY, 2.0, -INFINITY], [3.0, -INFINITY, 2.0, -INFINITY], True),
    "too few, masked": ([3.0, -INFINITY, -INFINITY, -INFINITY], [3.0, -INFINITY, -INFINITY, -INFINITY], True),
    "another, masked": ([3.0, -INFINITY, 2.0, -INFINITY], [-INFINITY, 2.0, -INFINITY, 3.0], False),
    "another of the best": ([INFINITY, 1.0, 2.0, 0.0], [1.0, INFINITY, 2.0, 0.0], False),
    "no number": ([NAN, 1.0, 2.0, 0.0], [NAN, 1.0, 2.0, 0.0], True),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("case", FITS)
def test_what_fits_the_numbers(case: str, ordered: bool) -> None:
    first, second, fits = (torch.tensor(value) for value in FITS[case])
    kept = first.topk(2)
    own = second.topk(2)
    choice = Choice(0, (kept.values, kept.indices if ordered else kept.indices.flip(0)), 4, False, in_order=ordered)
    values, indices = choice.made_again_where_it_fits(second, own)
    expected = (kept if fits else own).indices
    assert torch.equal(indices, expected if ordered or not fits else expected.flip(0))
    assert torch.equal(values.nan_to_num(), second[indices].nan_to_num())


def test_nothing_chosen_fits() -> None:
    empty = torch.empty(2, 0).topk(0)
    values, indices = Choice(1, empty, 0, False, in_order=True).made_again_where_it_fits(torch.empty(2, 0), empty)
    assert (values.shape, indices.shape) == ((2, 0), (2, 0))


def test_a_place_in_which_only_recompute_chooses_twice_is_an_error() -> None:
    attend = support.custom_attention(f"twice_{uuid.uuid4().hex[:8]}")
    runs: list[int] = []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        for _ in range(len(runs)):
            blocks = shared_helper(torch.tanh(key).mean(dim=(0, 1, 3)))
        return torch.tanh(attend(torch.tanh(query), key[:, :, blocks], value[:, :, blocks]))

    with pytest.raises(fastac.FastacError, match=r"more often .* \(shared_helper of test_selection.py in region of"):
        train_step(functools.partial(fastac.checkpoint, region), inputs())


def loop_of_choices(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """Two outputs that share no autograd node, of the first choice in a loop, and no attention that is saved."""
    scores, outputs = key.detach().mean(dim=(0, 1, 3)), []
    for i in range(2):
        blocks = (scores * (1, -2)[i]).topk(CHOSEN).indices
        if i == 0:
            outputs = [torch.tanh(key[:, :, blocks]).sum() * query, torch.cos(key[:, :, blocks]).sum() * query]
    return outputs


@ENGINES
def test_outputs_that_are_backpropagated_one_by_one(engine: str) -> None:
    def step(function: Callable[..., Any]) -> Any:
        data = inputs()
        for output in function(data["query"], data["key"]):
            output.sum().backward()
        return {name: data[name].grad for name in ("query", "key")}

    assert_same(step(functools.partial(fastac.checkpoint, loop_of_choices, engine=engine)), step(loop_of_choices))


def one_choice(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    blocks = key.detach().mean(dim=(0, 1, 3)).topk(CHOSEN).indices
    return [torch.tanh(key[:, :, blocks]).sum() * query]


@ENGINES
@pytest.mark.parametrize("region", [one_choice, loop_of_choices])
def test_a_second_backward_through_choices(region: Any, engine: str) -> None:
    data = inputs()
    leaves = [data["query"], data["key"]]
    outputs = fastac.checkpoint(region, *leaves, engine=engine)
    grads = [torch.autograd.grad(sum(outputs).sum(), leaves, retain_graph=True) for _ in range(3)]  # type: ignore[union-attr]
    for other in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(grads[0], other, strict=True))
