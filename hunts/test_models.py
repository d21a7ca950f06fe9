"""Random models, random policies, random sequences of what training does: exact, and saved, at every step.

Each example has twins: a model under fastac, and one that never was, to which everything else is done as well. After
every operation outputs and gradients are bitwise equal and the kernels ran as often as the policy says, or there was a
FastacError where one may be. `FASTAC_EXAMPLES=2000` hunts with so many examples, another seed each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastac import Policy
from hunts import models
from hunts.attention import SUPPORTED
from hunts.blocks import BlockSpec
from hunts.models import (
    ALL_CHANGES,
    ALL_KINDS,
    HOW,
    MAPPINGS,
    POLICIES,
    SHAPES,
    ModelSpec,
    Policies,
)
from hunts.steps import WAYS
from hunts.twins import Twins
from tests import support
from tests.backends import aten_on_cpu

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore:Full backward hook is firing")]

EXAMPLES = int(os.environ.get("FASTAC_EXAMPLES", "0"))


def examples(number: int) -> Any:
    """The settings of a property: so many examples, the same in every run, unless a hunt is on."""
    return settings(
        max_examples=EXAMPLES or number,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels() -> Iterator[None]:
    support.count_cpu_attention()
    with aten_on_cpu.registered():
        yield


Operation = tuple[Any, ...]
Steps = list[tuple[Operation, Operation]]
Arguments = st.SearchStrategy[tuple[Any, ...]]

ANY_POLICY = st.one_of(POLICIES, MAPPINGS)
PLACE, SHAPE = st.integers(0, 3), st.integers(0, len(SHAPES) - 1)
TRAINING = st.tuples(st.sampled_from(tuple(WAYS)), SHAPE, st.integers(0, 3))

KNOWN: dict[str, Arguments] = {
    "disable": st.just(()),
    "freeze": st.tuples(st.integers(0, 2**24 - 1)),
    "mode": st.tuples(st.booleans()),
    "optimize": st.tuples(st.sampled_from((0.001, 0.0001))),
    "sample": st.tuples(st.sampled_from(("no_grad", "inference"))),
    "fail": st.tuples(PLACE, st.sampled_from(("begin", "attention", "end")), st.booleans(), SHAPE),
    "enable": st.tuples(ANY_POLICY, st.sampled_from(("", *HOW[:2]))),
}
"""What may be done between two training steps -> the arguments of the method of Twins that does it."""


def operations(**more: Arguments) -> st.SearchStrategy[Steps]:
    """What is done to a model, each with the training step after it."""
    done = st.one_of([st.tuples(st.just(name), arguments) for name, arguments in {**KNOWN, **more}.items()])
    return st.lists(st.tuples(done, TRAINING), min_size=2, max_size=6)


def go_through(twins: Twins, policy: Policies, steps: Steps) -> None:
    twins.enable(policy)
    twins.train("plain", 0, 0)
    for (name, arguments), training in steps:
        getattr(twins, name)(*arguments)
        twins.train(*training)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("policy", ["attn_only", Policy("attn_only", min_kv=4)], ids=str)
def test_every_kind_of_attention_in_every_way(kind: str, policy: str | Policy) -> None:
    """What the random models are made of, one by one, with a generator that every call of it leaves further on."""
    block = BlockSpec(parts=((kind, "video"), (kind, "text")), dropout=0.2, adapted=True)
    twins = Twins(ModelSpec(blocks=(block,), order=(0, 0)))
    twins.enable(policy)
    for way in WAYS:
        twins.train(way, 0, 1)
        if twins.policy is None:  # after an error that may be
            twins.enable(policy)


@examples(150)
@given(models.models(changed=ALL_CHANGES), st.sampled_from(HOW), ANY_POLICY, operations())
def test_supported_attention(spec: ModelSpec, how: str, policy: Policies, steps: Steps) -> None:
    """There is no error, whatever is done, also where attention outputs are changed in place."""
    go_through(Twins(spec, how), policy, steps)


@examples(100)
@given(
    models.models(ALL_KINDS, ALL_CHANGES),
    st.sampled_from(HOW),
    ANY_POLICY,
    operations(remake=st.tuples(PLACE, st.lists(st.sampled_from(ALL_KINDS), min_size=3, max_size=3))),
)
def test_attention_that_cannot_be_saved(spec: ModelSpec, how: str, policy: Policies, steps: Steps) -> None:
    """Exact or refused, and refused where all of it would be recomputed."""
    go_through(Twins(spec, how), policy, steps)


@examples(20)
@given(
    models.models(("sdpa", "mask", "grouped", "chunked")),
    st.sampled_from(HOW),
    ANY_POLICY,
    PLACE,
    st.sampled_from(("eager", "aot_eager")),
    operations(compile=st.tuples(PLACE, st.just("eager"))),
)
def test_compiled_blocks(spec: ModelSpec, how: str, policy: Policies, place: int, backend: str, steps: Steps) -> None:
    """A block that is compiled before the first step, and others later on."""
    twins = Twins(spec, how)
    twins.compile(place, backend)
    go_through(twins, policy, steps)
