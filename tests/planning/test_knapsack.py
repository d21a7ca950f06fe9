"""What blocks save for a budget of bytes: against all subsets, and on models of real size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastac import budget
from fastac.budget import Choice, Output, choose, frontier
from fastac.errors import FastacError

GIB = 2**30
Blocks = dict[str, list[Output]]


def linear(name: str, tokens: int, inner: int, outer: int) -> Output:
    """The output of a Linear module in bf16."""
    return Output(name, tokens * outer * 2, 2 * tokens * inner * outer)


def attention(tokens: int, keys: int, width: int, heads: int) -> Output:
    """The output of an attention call in bf16, with its logsumexp in fp32."""
    return Output("sdpa", tokens * width * 2 + heads * tokens * 4, 4 * tokens * keys * width, keys)


def wan(blocks: int = 40) -> Blocks:
    """Wan 14B at 72,000 tokens."""
    tokens, width = 72_000, 5120
    block = [attention(tokens, tokens, width, 40), attention(tokens, 512, width, 40)]
    block += [linear(f"attn1.{name}", tokens, width, width) for name in "qkvo"]
    block += [linear(f"attn2.{name}", tokens, width, width) for name in "qo"]
    block += [linear(f"attn2.{name}", 512, width, width) for name in "kv"]
    block += [linear("ffn.0", tokens, width, 13_824), linear("ffn.2", tokens, 13_824, width)]
    return {f"blocks.{index}": block for index in range(blocks)}


def hunyuan_video(modulation: bool = False) -> Blocks:
    """HunyuanVideo: 20 blocks of two streams, and 40 where these are joined. modulation: with outputs of one token."""
    width, inner = 3072, 12_288
    streams = {"": 72_000, "context_": 256}
    tokens = sum(streams.values())
    double = [attention(tokens, tokens, width, 24)]
    for stream, length in streams.items():
        double += [linear(stream + name, length, width, width) for name in ("q", "k", "v", "o")]
        double += [linear(stream + "ff.0", length, width, inner), linear(stream + "ff.2", length, inner, width)]
        double += [linear(stream + "norm", 1, width, 6 * width)] * modulation
    single = [attention(tokens, tokens, width, 24), linear("mlp", tokens, width, inner)]
    single += [linear(name, tokens, width, width) for name in "qkv"]
    single += [linear("out", tokens, width + inner, width)] + [linear("norm", 1, width, 3 * width)] * modulation
    return {f"double.{n}": double for n in range(20)} | {f"single.{n}": single for n in range(40)}


MODELS = pytest.mark.parametrize("blocks", [wan(), hunyuan_video()], ids=["Wan", "HunyuanVideo"])


def total(choices: dict[str, Choice]) -> tuple[int, int]:
    """Bytes and flops of what all blocks save."""
    return sum(choice.bytes for choice in choices.values()), sum(choice.flops for choice in choices.values())


def possible(outputs: Sequence[Output]) -> set[tuple[int, int]]:
    """Bytes and flops of everything that one block may save."""
    names = sorted({out.name for out in outputs if not out.keys})
    subsets = [set(taken) for count in range(len(names) + 1) for taken in itertools.combinations(names, count)]
    sums = set()
    for bound in [float("inf"), *(out.keys for out in outputs if out.keys)]:
        for taken in subsets:
            saved = [out for out in outputs if (out.keys >= bound if out.keys else out.name in taken)]
            sums.add((sum(out.bytes for out in saved), sum(out.flops for out in saved)))
    return sums


def all_sums(blocks: Blocks) -> set[tuple[int, int]]:
    """Bytes and flops of everything that a model may save."""
    sums = {(0, 0)}
    for outputs in blocks.values():
        sums = {(a + b, f + g) for a, f in sums for b, g in possible(outputs)}
    return sums


def best(sums: set[tuple[int, int]], limit: int) -> tuple[int, int]:
    """Of these bytes and flops those of most flops within a limit, with fewest bytes."""
    return max((pair for pair in sums if pair[0] <= limit), key=lambda pair: (pair[1], -pair[0]))


def outputs_of_blocks() -> Any:
    """Up to three Linear modules, some called twice, and up to three attention calls. Many sizes are equal, some 0."""
    size = st.integers(0, 6)
    return st.lists(
        st.builds(Output, st.sampled_from("abc"), size, size)
        | st.builds(Output, st.just("sdpa"), size, size, st.sampled_from([7, 512, 1024])),
        max_size=5,
    )


@st.composite
def random_blocks(draw: Any) -> Blocks:
    """Up to four blocks of up to two kinds."""
    kinds = draw(st.lists(outputs_of_blocks(), min_size=1, max_size=2))
    return {f"blocks.{n}": kind for n, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=4)))}


def examples(number: int) -> Any:
    """The settings of a property: so many examples, the same in every run."""
    return settings(max_examples=number, derandomize=True, deadline=None, database=None)


LIMITS = st.integers(0, 60)


@examples(300)
@given(random_blocks(), LIMITS)
def test_no_other_choice_saves_more(blocks: Blocks, limit: int) -> None:
    assert total(choose(blocks, limit)) == best(all_sums(blocks), limit)


@examples(200)
@given(random_blocks(), LIMITS)
def test_sizes_of_gigabytes_are_exact_to_the_byte(blocks: Blocks, limit: int) -> None:
    """Up to `POINTS` sums: none is given up, however close to another one."""
    for name, outputs in blocks.items():
        blocks[name] = [dataclasses.replace(out, bytes=out.bytes * 10**9 + out.flops) for out in outputs]
    limit = limit * 10**9 + limit // 2
    assert total(choose(blocks, limit)) == best(all_sums(blocks), limit)


def test_a_short_list_is_not_thinned() -> None:
    block = [Output("a", 10**9 + 1, 2), Output("b", 10**9, 1), Output("c", 10**9 - 1, 5)]
    assert choose({"block": block}, 2 * 10**9 - 1)["block"].linear == ("b", "c")


@examples(100)
@given(random_blocks(), LIMITS)
def test_the_list_of_sums_has_every_undominated_one_and_no_other(blocks: Blocks, limit: int) -> None:
    sums, flops, _ = budget._undominated(budget._steps(budget._pools(blocks)), limit)
    everything = all_sums(blocks)
    expected = dict.fromkeys(best(everything, size) for size in range(limit + 1))
    assert list(zip(sums.tolist(), flops.tolist(), strict=True)) == list(expected)


@examples(200)
@given(random_blocks(), LIMITS)
def test_choices_are_what_they_say(blocks: Blocks, limit: int) -> None:
    chosen = choose(blocks, limit)
    assert list(chosen) == list(blocks)
    for name, choice in chosen.items():
        outputs = blocks[name]
        keys = [out.keys for out in outputs if out.keys]
        assert choice.min_kv is None or choice.min_kv in keys
        linears = list(dict.fromkeys(out.name for out in outputs if not out.keys))
        assert choice.linear == tuple(linear for linear in linears if linear in choice.linear)
        bound = choice.min_kv or max(keys, default=0) + 1
        saved = [out for out in outputs if (out.keys >= bound if out.keys else out.name in choice.linear)]
        assert (choice.bytes, choice.flops) == (sum(out.bytes for out in saved), sum(out.flops for out in saved))


@examples(200)
@given(random_blocks(), LIMITS)
def test_what_costs_nothing_is_saved_and_what_gains_nothing_is_not(blocks: Blocks, limit: int) -> None:
    for name, choice in choose(blocks, limit).items():
        for linear in {out.name for out in blocks[name] if not out.keys}:
            calls = [out for out in blocks[name] if out.name == linear and not out.keys]
            if not any(out.flops for out in calls):
                assert linear not in choice.linear
            elif not any(out.bytes for out in calls):
                assert linear in choice.linear
        at_the_bound = [out.flops for out in blocks[name] if out.keys and out.keys == choice.min_kv]
        assert choice.min_kv is None or any(at_the_bound)


@examples(200)
@given(random_blocks(), LIMITS)
def test_of_equal_blocks_an_earlier_one_saves_a_subset(blocks: Blocks, limit: int) -> None:
    chosen = choose(blocks, limit)
    for earlier, later in itertools.combinations(blocks, 2):
        if blocks[earlier] == blocks[later]:
            first, last = chosen[earlier], chosen[later]
            assert set(first.linear) <= set(last.linear)
            assert first.min_kv is None or (last.min_kv is not None and last.min_kv <= first.min_kv)


@examples(100)
@given(random_blocks(), st.integers(2, 12))
def test_the_frontier_is_what_choose_finds_for_its_limits(blocks: Blocks, points: int) -> None:
    found = frontier(blocks, points)
    everything = best(all_sums(blocks), 1000)[0]
    limits = [everything * number // (points - 1) for number in range(points)]
    assert found == list(dict.fromkeys(total(choose(blocks, limit)) for limit in limits))
    assert [total(choose(blocks, size)) for size, _ in found] == found


def test_attention_over_fewer_keys_is_not_saved_without_that_over_more() -> None:
    block = [Output("sdpa", 10, 20, keys=1024), Output("sdpa", 1, 15, keys=512), Output("sdpa", 0, 1, keys=77)]
    assert choose({"block": block}, 9)["block"] == Choice(None, (), 0, 0)
    assert choose({"block": block}, 10)["block"] == Choice(1024, (), 10, 20)
    assert choose({"block": block}, 11)["block"] == Choice(77, (), 11, 36)


def test_equal_blocks_may_save_attention_over_three_different_numbers_of_keys() -> None:
    block = [Output("sdpa", 10, 100, keys=1024), Output("sdpa", 5, 10, keys=512)]
    chosen = choose({f"blocks.{n}": block for n in range(3)}, 25)
    assert [choice.min_kv for choice in chosen.values()] == [None, 1024, 512]


def test_calls_over_as_many_keys_stand_or_fall_together() -> None:
    block = [Output("sdpa", 4, 8, keys=512), Output("flash", 4, 1, keys=512)]
    assert choose({"block": block}, 7)["block"].min_kv is None
    assert choose({"block": block}, 8)["block"] == Choice(512, (), 8, 9)


def test_calls_of_one_linear_module_stand_or_fall_together() -> None:
    block = [Output("proj", 4, 8), Output("out", 5, 1), Output("proj", 4, 8)]
    assert choose({"block": block}, 7)["block"] == Choice(None, ("out",), 5, 1)
    assert choose({"block": block}, 8)["block"] == Choice(None, ("proj",), 8, 16)


def test_zero_sizes() -> None:
    block = [Output("sdpa", 3, 0, keys=9), Output("free", 0, 5), Output("useless", 0, 0), Output("worse", 3, 0)]
    assert choose({"block": block}, 0)["block"] == choose({"block": block}, 9)["block"] == Choice(None, ("free",), 0, 5)


def test_attention_without_gain_is_saved_only_for_that_over_fewer_keys() -> None:
    block = [Output("sdpa", 3, 0, keys=9), Output("sdpa", 3, 5, keys=8)]
    assert choose({"block": block}, 5)["block"].min_kv is None
    assert choose({"block": block}, 6)["block"] == Choice(8, (), 6, 5)


def test_what_saves_no_flops_is_no_step() -> None:
    assert budget._steps(budget._pools({"block": [Output("out", 3, 0)], "empty": []})) == []


def test_no_blocks_and_no_outputs() -> None:
    assert choose({}, 9) == {}
    assert choose({"block": []}, 9) == {"block": Choice(None, (), 0, 0)}
    assert frontier({}) == frontier({"block": []}) == [(0, 0)]


def test_the_last_blocks_save_first() -> None:
    block = [Output("sdpa", 10, 100, keys=512), Output("ffn.0", 10, 50), Output("ffn.2", 10, 50)]
    chosen = choose({f"blocks.{n}": block for n in range(4)}, 75)
    assert [choice.min_kv for choice in chosen.values()] == [512] * 4
    assert [choice.linear for choice in chosen.values()] == [(), (), ("ffn.0",), ("ffn.0", "ffn.2")]


def test_equal_outputs_of_unlike_blocks_are_saved_by_the_last() -> None:
    blocks = {"double": [Output("q", 10, 50), Output("k", 3, 1)], "single": [Output("proj", 10, 50)]}
    assert [choice.linear for choice in choose(blocks, 10).values()] == [(), ("proj",)]


def test_the_limit_may_be_beyond_everything() -> None:
    blocks = hunyuan_video(modulation=True)
    assert total(choose(blocks, 10**30)) == total_of(blocks, lambda index, out: True)


def test_a_negative_limit_is_an_error() -> None:
    with pytest.raises(FastacError, match="limit=-1: a number of bytes"):
        choose(wan(1), -1)


def total_of(blocks: Blocks, taken: Any) -> tuple[int, int]:
    """Bytes and flops of the outputs for which `taken` (of the block's index, and the output) is true."""
    saved = [out for index, outputs in enumerate(blocks.values()) for out in outputs if taken(index, out)]
    return sum(out.bytes for out in saved), sum(out.flops for out in saved)


SETS = {
    "all attention": lambda index, out: out.keys,
    "long attention": lambda index, out: out.keys >= 1024,
    "attention and every second Linear": lambda index, out: out.keys or out.name[-1] in "qv0",
    "attention and Linears of every second block": lambda index, out: out.keys or index % 2,
}


@MODELS
@pytest.mark.parametrize("taken", SETS.values(), ids=SETS)
def test_a_big_model_saves_at_least_what_a_set_by_hand_does(blocks: Blocks, taken: Any) -> None:
    size, flops = total_of(blocks, taken)
    chosen = total(choose(blocks, size))
    assert chosen[0] <= size
    assert chosen[1] >= flops


@MODELS
def test_long_attention_is_the_best_for_its_bytes(blocks: Blocks) -> None:
    size, flops = total_of(blocks, SETS["long attention"])
    assert total(choose(blocks, size)) == (size, flops)


@MODELS
@pytest.mark.parametrize("limit", [8 * GIB, 24 * GIB, 80 * GIB, 300 * GIB])
def test_big_models_need_no_thinning(blocks: Blocks, limit: int) -> None:
    _, _, origins = budget._undominated(budget._steps(budget._pools(blocks)), limit)
    assert max(len(origin) for origin, _ in origins) < budget.POINTS


def test_lists_stay_short_while_parts_go_one_by_one_and_large_outputs_are_added() -> None:
    steps = budget._steps(budget._pools(wan()))
    assert [len(step.levels) for step in steps[:41]] == [3] * 40 + [2]
    _, _, origins = budget._undominated(steps, 80 * GIB)
    assert sum(len(origin) for origin, _ in origins) < 100_000  # small outputs first: 268,000 and more


@MODELS
def test_a_big_model_has_few_different_choices(blocks: Blocks) -> None:
    chosen = choose(blocks, 80 * GIB)
    assert total(chosen)[0] > 79.9 * GIB
    assert len(set(chosen.values())) <= 6
    assert chosen == choose(blocks, 80 * GIB)


@MODELS
def test_the_frontier_of_a_big_model(blocks: Blocks) -> None:
    found = frontier(blocks)
    assert len(found) == 33
    assert found[0] == (0, 0)
    assert found[-1] == total_of(blocks, lambda index, out: True)
    assert all(size < larger and flops < more for (size, flops), (larger, more) in itertools.pairwise(found))
    assert [total(choose(blocks, size)) for size, _ in found[::8]] == found[::8]


def slack(blocks: Blocks, limit: int) -> int:
    """By how many bytes a limit may have to be lower for exact choices to save no more than with thinned lists."""
    return len(budget._steps(budget._pools(blocks))) * (limit // budget.POINTS + 1)


@pytest.mark.parametrize("limit", [1 * GIB, 10 * GIB, 70 * GIB, 200 * GIB])
def test_a_thinned_list_stays_within_the_limit_and_near_the_optimum(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = hunyuan_video()
    exact = total(choose(blocks, limit))
    monkeypatch.setattr(budget, "POINTS", 2000)
    below = limit - slack(blocks, limit)
    thinned = choose(blocks, limit)
    _, _, origins = budget._undominated(budget._steps(budget._pools(blocks)), limit)
    monkeypatch.undo()
    assert max(len(origin) for origin, _ in origins) <= 2001
    assert total(thinned)[0] <= limit
    assert total(choose(blocks, below))[1] <= total(thinned)[1] <= exact[1]


@examples(200)
@given(random_blocks(), LIMITS, st.integers(1, 8))
def test_any_thinned_list_stays_within_the_limit_and_near_the_optimum(blocks: Blocks, limit: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "POINTS", most)
        size, flops = total(choose(blocks, limit))
        points = frontier(blocks, 5)
        below = limit - slack(blocks, limit)
    sums = all_sums(blocks)
    assert size <= limit
    assert flops >= (best(sums, below)[1] if below >= 0 else best(sums, 0)[1])
    assert points[0][0] == 0
    assert points == sorted(points)


def test_outputs_of_one_token_are_thinned_and_still_fill_the_budget() -> None:
    """Modulation: all Linears of one width save as much per byte, so nearly every sum of sizes is undominated."""
    blocks = hunyuan_video(modulation=True)
    _, _, origins = budget._undominated(budget._steps(budget._pools(blocks)), 40 * GIB)
    assert max(len(origin) for origin, _ in origins) > budget.POINTS // 2
    size, _ = total(choose(blocks, 80 * GIB))
    assert 80 * GIB - 2**20 < size <= 80 * GIB
