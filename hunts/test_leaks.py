"""A long run in which everything happens now and then: afterwards nothing is left that was not there early on."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac import Policy
from hunts.attention import observed
from hunts.blocks import BlockSpec
from hunts.models import HOW, SHAPES, ModelSpec
from hunts.steps import WAYS
from hunts.twins import Twins
from tests import support

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

STEPS, WARM_UP = 1200, 400
ROOT = Path(__file__).parents[1]

SPEC = ModelSpec(
    blocks=(
        BlockSpec(parts=(("sdpa", "video"), ("sparse", "text")), dropout=0.1),
        BlockSpec(parts=(("visible", "video"), ("drawing", "text")), in_place=True),
    ),
    order=(0, 1),
)

POLICIES: tuple[Any, ...] = ("attn_only", "full", Policy("attn_only", min_kv=4), {"blocks.1": "full", "*": "attn_only"})

EVENTS: dict[str, tuple[Sequence[Any], ...]] = {
    "disable": (),
    "enable": (POLICIES, HOW[:2]),
    "fail": ((0, 1), ("begin", "attention"), (True, False), range(len(SHAPES))),
    "sample": (("no_grad", "inference"),),
    "optimize": ((1e-5,),),
}
"""Method of Twins -> what each of its arguments is chosen from."""


class Run:
    """Training of twins, which are compared in every step. A random number decides what else happens in a step."""

    def __init__(self) -> None:
        self.twins, self.random = Twins(SPEC), random.Random(0)

    def step(self) -> None:
        twins, choice = self.twins, self.random.choice
        if self.random.random() < 0.3:
            name = choice(list(EVENTS))
            getattr(twins, name)(*map(choice, EVENTS[name]))
            fastac.report(twins.checked)
        if twins.policy is None:
            twins.enable(choice(POLICIES), choice(HOW[:2]))
        way = choice(list(WAYS)) if self.random.random() < 0.3 else "plain"
        twins.train(way, self.random.randrange(len(SHAPES)), self.random.randrange(5))

    def alive_at_rest(self) -> dict[str, int]:
        self.twins.disable()
        self.twins.enable("attn_only", "hook")
        for model in self.twins.both:
            model.zero_grad()
        return alive()


def alive() -> dict[str, int]:
    """Objects of this process by type, tensors and their bytes, threads, and ops."""
    observed.calls.clear()
    observed.raised = None
    while gc.collect():  # a graph that is freed may free a cycle behind it
        pass
    found: Counter[str] = Counter()
    storages = {}
    for value in gc.get_objects():
        kind = type(value)
        found[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    found["bytes of tensors"] = sum(storages.values())
    found["threads"] = threading.active_count()
    found["ops of torch"] = len(torch._C._dispatch_get_all_op_names())
    return dict(found)


ALLOWED = 10
"""Objects of Python's own types that caches may come to hold late: fewer than the rarest event would leave behind."""


def left_over(run: Run, steps: int) -> dict[str, int]:
    """What grew in so many steps and must not: nothing of fastac's or torch's, no tensor."""
    before = run.alive_at_rest()
    for _ in range(steps):
        run.step()
    grown = {name: number - before.get(name, 0) for name, number in run.alive_at_rest().items()}
    caches = ("builtins.", "weakref.", "re.")
    return {name: n for name, n in grown.items() if n > (ALLOWED if name.startswith(caches) else 0)}


def test_nothing_is_left_behind() -> None:
    """In a process of its own: where other tests compiled something, torch's caches still fill."""
    code = "from hunts import test_leaks; test_leaks.soak()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def soak(steps: int = STEPS, warm_up: int = WARM_UP) -> None:
    torch.set_num_threads(1)
    support.count_cpu_attention()
    run = Run()
    left_over(run, warm_up)
    assert not (left := left_over(run, steps - warm_up)), left
