"""`plan.within`: what is chosen for a number of bytes, or a memory, fits, and little that fits is better."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from random import Random
from typing import Any

import pytest
import torch

import fastac
from fastac import FastacError, Policy
from fastac.errors import parse_bytes, readable_bytes
from tests.marks import quick, soak
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, plan_of, stack_inputs, tiny
from tests.support import stack

LINEAR = Policy(linear=("*",))

# Bytes of saved outputs


LINEAR_MODULES = ("qkv", "self_out", "q", "kv", "cross_out", "ffn.0", "ffn.2")


@functools.cache
def planned_sums(is_wide: bool) -> tuple[fastac.Plan, list[tuple[int, int]]]:
    """A plan of two blocks, and the bytes and recomputed FLOPs of everything that they could save."""
    model = stack()
    if is_wide:
        model.blocks[0].ffn = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 16))
    plan = fastac.plan(model, stack_inputs(), blocks="blocks")
    sets = [taken for count in range(8) for taken in itertools.combinations(LINEAR_MODULES, count)]
    choices = [Policy("linear_only", linear=taken) if taken else Policy("full") for taken in sets]
    choices += [Policy(min_kv=keys, linear=taken) for keys in (0, 7) for taken in sets]
    full, sums = plan.policies[1].recomputed_flops, {(0, 0)}
    for block in plan.within(0):
        rows = [planned.row_of(plan, {**plan.within(0), block: policy}) for policy in choices]
        pairs = {(row.saved_bytes, full - row.recomputed_flops) for row in rows}
        sums = {(size + more, flops + avoided) for size, flops in sums for more, avoided in pairs}
    return plan, [(size, full - flops) for size, flops in sums]


@pytest.mark.parametrize("is_wide", [False, True])
def test_no_other_choice_saves_much_more(is_wide: bool) -> None:
    """Than 2 %. And of two equal blocks the earlier one saves a subset."""
    plan, sums = planned_sums(is_wide)
    full = plan.policies[1].recomputed_flops
    random = Random(0)
    for _ in range(20):
        limit = random.randint(0, max(sums)[0] + 1)
        chosen = plan.within(limit)
        found = planned.row_of(plan, chosen)
        flops = min(flops for size, flops in sums if size <= limit)
        assert found.saved_bytes <= limit
        assert full - found.recomputed_flops >= 0.98 * (full - flops)
        first, last = chosen.values()
        assert is_wide or set(first.linear) <= set(last.linear)
        assert is_wide or all(last.saves(keys) for keys in (6, 24) if first.saves(keys))


def test_bytes_of_a_policy_are_used_no_worse() -> None:
    """With them, or some more, no more is run again, and no more is saved; with more bytes less is."""
    plan = fastac.plan(stack(layers=4), stack_inputs(1100), blocks="blocks")
    for policy in ("attn_only", "long_attn_only", Policy(min_kv=13), LINEAR):
        fixed = planned.row_of(plan, policy)
        for limit in (fixed.saved_bytes, fixed.saved_bytes + 1, fixed.saved_bytes * 9 // 8):
            found = planned.row_of(plan, plan.within(limit))
            assert found.recomputed_flops <= fixed.recomputed_flops, policy
            assert found.saved_bytes <= limit, policy
    everything = planned.row_of(plan, LINEAR)
    rows = [planned.row_of(plan, plan.within(everything.saved_bytes * share // 7)) for share in range(8)]
    again = [row.recomputed_flops for row in rows]
    assert all(row.saved_bytes <= everything.saved_bytes * share // 7 for share, row in enumerate(rows))
    assert again == sorted(again, reverse=True)
    assert again[-1] == everything.recomputed_flops < again[0]


def test_within_takes_bytes_as_people_write_them() -> None:
    plan = plan_of(WAN)
    assert plan.within("20KiB") == plan.within(20 * 1024)
    assert {policy.linear for policy in plan.within("20KiB", linear=False).values()} == {()}
    offloading = plan.within("20KiB", offload=True)
    assert {policy.offload for policy in offloading.values()} == {True}
    staying = {name: dataclasses.replace(policy, offload=False) for name, policy in offloading.items()}
    assert staying == plan.within("20KiB")
    assert set(plan.within(1, offload=True).values()) == {Policy("full", offload=True)}


def test_numbers_of_bytes() -> None:
    """Read, and as fastac writes them."""
    written = {"1234B": 1234, "24 GB": 24 * 10**9, " 24gib ": 24 * 2**30, "1.5GiB": 3 * 2**29, "0.7KiB": 716}
    sizes = [0, 1023, 1536, 24 * 2**30, 3 * 2**40]
    for text, size in (written | {"0": 0, 1234: 1234} | {readable_bytes(size): size for size in sizes}).items():
        parsed = parse_bytes(text)
        assert (parsed, type(parsed)) == (size, int)


@pytest.mark.parametrize(
    "text", [-1, True, 1.5, "", "GiB", "-1GiB", "1e9", "24 apples", "24G", "1.5", "1.5B", "40", "nan"]
)
def test_what_is_no_number_of_bytes(text: Any) -> None:
    with pytest.raises(FastacError, match=repr(text)):
        plan_of(WAN).within(text)


def test_bytes_in_which_nothing_can_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, with the bytes that are needed: one less is not enough."""
    plan = fastac.plan(*tiny(WAN))
    assert not caplog.messages
    assert set(plan.within(1).values()) == {Policy("full")}
    (said,) = caplog.messages
    needed = int(said.removeprefix("plan.within(1 B) saves nothing: the smallest output takes ").removesuffix(" bytes"))
    for size, saves in ((needed, True), (needed - 1, False)):
        caplog.clear()
        policies = plan.within(size).values()
        assert all(not policy.is_selective for policy in policies) == bool(caplog.messages) == (not saves)
    plan = fastac.plan(torch.nn.Sequential(torch.nn.Linear(8, 8)), [torch.randn(2, 8)], blocks=["0"])
    plan.within("1GiB", linear=False)
    assert caplog.messages[-1] == "plan.within(1.0 GiB) saves nothing: no output of a block can be saved"


# Bytes of the device and the host


@pytest.mark.parametrize("seed", [1, *soak(*range(2, 12))])
@pytest.mark.parametrize("name", quick([WAN, LTX, COGVIDEOX, HUNYUAN_VIDEO], WAN))
def test_what_is_within_a_memory_fits(name: str, seed: int) -> None:
    """The peak and the host's bytes of a step that runs, within random sizes."""
    model, inputs = tiny(name)
    random = Random(seed)
    with planned.exact() as device:
        plan = fastac.plan(model, inputs)
        peaks = [row.peak_bytes for row in plan.policies]
        assert {policy.name for policy in plan.within(memory="1GiB").values()} == {"none"}
        between = (plan.policies[3].peak_bytes + planned.row_of(plan, LINEAR).peak_bytes) // 2
        for linear in (True, False):
            chosen = plan.within(memory=between, linear=linear)
            assert any(policy.linear for policy in chosen.values()) == linear
        for host, least in ((0, plan.policies[1].peak_bytes), (max(peaks), min(peaks))):
            memory = random.randint(least, max(peaks))
            chosen = plan.within(memory=memory, host=host, gbps=1e12)
            fits = [row.flops for row in plan.policies if row.peak_bytes <= memory and row.host_bytes <= host]
            assert planned.row_of(plan, chosen).flops <= min(fits)
            mine = planned.under(model, chosen)
            planned.step(mine, inputs)
            _, waiting, peak = planned.live(mine, inputs, device)
            assert peak + plan.states.total <= memory
            assert waiting <= host


def test_it_is_the_best_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """Of every attention that each of three blocks could save, on the device or on the host."""
    places = [
        Policy(name, *least, offload=on_host, keep=1 + (not on_host))
        for on_host in (False, True)
        for name, *least in (("full",), ("attn_only", 13), ("attn_only",))
    ]
    random = Random(0)
    with planned.exact():
        plan = fastac.plan(*tiny(WAN, num_layers=3))
        mixed = itertools.product(places, repeat=3)
        rows = [planned.row_of(plan, dict(zip(plan.within(0), one, strict=True))) for one in mixed]
        peaks, sizes = ({getattr(row, name) for row in rows} for name in ("peak_bytes", "host_bytes"))
        rates = sorted({row.bytes_per_flop * plan.tflops * 1e3 for row in rows} - {0.0})
        for _ in range(40):
            memory, host = random.randint(min(peaks), max(peaks)), random.choice([0, random.randint(0, max(sizes))])
            gbps = random.choice([1e12, random.choice(rates)])
            fits = [row for row in rows if row.peak_bytes <= memory and row.host_bytes <= host]
            hidden = [row for row in fits if row.bytes_per_flop * plan.tflops * 1e3 <= gbps]
            if not fits:
                with pytest.raises(FastacError, match="no policy fits"):
                    plan.within(memory=memory, host=host, gbps=gbps, linear=False)
                continue
            caplog.clear()
            found = planned.row_of(plan, plan.within(memory=memory, host=host, gbps=gbps, linear=False))
            assert (found.peak_bytes <= memory, found.host_bytes <= host) == (True, True)
            if hidden:
                assert found.recomputed_flops <= min(row.recomputed_flops for row in hidden)
                assert not caplog.messages


def test_more_memory_is_not_worse() -> None:
    """Of the device, with a host and without."""
    with planned.exact():
        plan = fastac.plan(*tiny(WAN, num_layers=4))
        _, full, *_, leaving, _ = plan.policies
        for host, least in ((0, full.peak_bytes), ("1GiB", leaving.peak_bytes)):
            memories = [least + (planned.row_of(plan, LINEAR).peak_bytes - least) * share // 12 for share in range(13)]
            rows = [planned.row_of(plan, plan.within(memory=memory, host=host, gbps=1e12)) for memory in memories]
            again = [row.recomputed_flops for row in rows]
            assert again == sorted(again, reverse=True)
            assert again[-1] == 0


def test_a_memory_in_which_nothing_fits(caplog: pytest.LogCaptureFixture) -> None:
    """But with copies that the device waits for; and not with these either."""
    with planned.exact():
        plan = fastac.plan(stack(layers=4), stack_inputs(8192), blocks="blocks")
        least = plan.policies[1].peak_bytes
        assert planned.row_of(plan, plan.within(memory=least)).peak_bytes == least
        waits = plan.within(memory=plan.policies[4].peak_bytes, host=plan.policies[4].host_bytes, gbps=1e-3)
        assert any(policy.offload for policy in waits.values())
        assert "plan: nothing fits without copies to the host that need " in caplog.text
        for host in (0, "1B"):  # a byte of the host is of no use
            with pytest.raises(FastacError) as refused:
                plan.within(memory=least - 1, host=host)
            said = str(refused.value)
            assert said.startswith(f"plan.within(memory={least - 1}, host={host!r}): no policy fits. Besides ")
            least_bytes = readable_bytes(least - plan.states.total)
            assert f"a step takes {least_bytes} at least (10.8 MiB with 512.0 KiB of host memory)" in said
            assert "100% of the tokens would fit: fewer frames" in said


def test_arguments_of_within() -> None:
    for saved, options, message in (
        (None, {}, "give either"),
        ("1GiB", {"memory": "1GiB"}, "give either"),
        ("1GiB", {"host": "1GiB"}, "give either"),
        (None, {"memory": "1GiB", "offload": True}, "give either"),
        (None, {"memory": "1"}, "'1': expected bytes"),
        (None, {"memory": "1GiB", "host": "1"}, "'1': expected bytes"),
        (None, {"memory": "1GiB", "gbps": 0}, "0 GB/s beside 400 TFLOP/s"),
    ):
        with pytest.raises(FastacError, match=message):
            plan_of(WAN).within(saved, **options)
