"""A long run in which everything happens now and then: afterwards nothing is left that was not there early on."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac import Policy
from tests import support
from tests.soak import models
from tests.soak.attention import observed
from tests.soak.blocks import BlockSpec, UserError
from tests.soak.models import HOW, SHAPES, ModelSpec, RandomModel
from tests.support import assert_same, loss_of, train_step

pytestmark = pytest.mark.soak

STEPS, WARM_UP = 2000, 500
ROOT = Path(__file__).parents[2]

SPEC = ModelSpec(
    blocks=(
        BlockSpec(parts=(("sdpa", "video"), ("sparse", "text")), style="tuple", dropout=0.1),
        BlockSpec(parts=(("visible", "video"), ("drawing", "text")), style="dict", in_place=True),
    ),
    order=(0, 1),
)

POLICIES: tuple[Any, ...] = ("attn_only", "full", Policy("attn_only", min_kv=4), {"blocks.1": "full", "*": "attn_only"})


class Run:
    """Training, in which a random number decides what else happens in a step."""

    def __init__(self, seed: int = 0) -> None:
        self.model = models.build(SPEC)
        self.random = random.Random(seed)
        self.how = "hook"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)
        self.forward()  # which defines the ops of its kernels
        self.enable()

    def enable(self, policy: Any = "attn_only") -> None:
        if self.how == "checkpoint" and isinstance(policy, dict):
            policy = "attn_only"
        self.model.enable(policy, self.how)

    def alive_at_rest(self) -> dict[str, int]:
        """What there is, always in the same state."""
        self.model.disable()
        self.how = "hook"
        self.enable()
        self.optimizer.zero_grad()
        return alive()

    def inputs(self) -> dict[str, torch.Tensor]:
        return models.inputs(SPEC, self.random.randrange(len(SHAPES)), self.random.randrange(5))

    def forward(self, model: RandomModel | None = None) -> torch.Tensor:
        return loss_of((model or self.model)(**self.inputs()))

    def step(self) -> None:
        """One optimizer step, and before it, now and then, something else."""
        if self.random.random() < 0.3:
            getattr(self, self.random.choice(EVENTS))()
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    # What happens now and then

    def switched(self) -> None:
        self.model.disable()
        self.how = self.random.choice(HOW)
        self.enable(self.random.choice(POLICIES))

    def copied(self) -> None:
        copied = copy.deepcopy(self.model)
        self.forward(copied).backward()

    def copied_and_kept_by_its_graph(self) -> None:
        loss = self.forward(copy.deepcopy(self.model))
        gc.collect(0)
        loss.backward()

    def fails(self) -> None:
        block = self.random.choice(list(self.model.blocks))
        block.failure = self.random.choice((("begin", False), ("attention", False), ("begin", True)))
        with pytest.raises(UserError):
            self.forward().backward()

    def dropped(self) -> None:
        self.forward()

    def backward_twice(self) -> None:
        loss = self.forward()
        loss.backward(retain_graph=True)
        loss.backward()

    def in_a_thread(self) -> None:
        thread = threading.Thread(target=lambda: self.forward().backward())
        thread.start()
        thread.join()

    def sampled(self) -> None:
        with self.random.choice((torch.no_grad, torch.inference_mode))():
            self.model(**self.inputs())

    def reported(self) -> None:
        fastac.report(self.model)


EVENTS = (
    "switched",
    "copied",
    "copied_and_kept_by_its_graph",
    "fails",
    "dropped",
    "backward_twice",
    "in_a_thread",
    "sampled",
    "reported",
)


def alive() -> dict[str, int]:
    """What there is in this process: objects by type, tensors and their bytes, threads, and what fastac keeps."""
    observed.calls.clear()
    observed.raised = None
    gc.collect()
    found: Counter[str] = Counter()
    storages = {}
    for value in gc.get_objects():
        kind = type(value)
        found[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
            storage = value.untyped_storage()
            if isinstance(storage.nbytes(), int):  # not a number of shapes, as in what a test before compiled
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
    code = "from tests.soak import test_leaks; test_leaks.soak()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def soak() -> None:
    """After thousands of steps there is what there was after hundreds, and a step is still exact."""
    torch.set_num_threads(1)
    support.count_cpu_attention()
    run = Run()
    left_over(run, WARM_UP)
    assert not (left := left_over(run, STEPS - WARM_UP)), left

    inputs = run.inputs()
    support.executions.clear()
    found = train_step(run.model, inputs)
    executed = support.executions.copy()
    run.model.disable()
    support.executions.clear()
    assert_same(found, train_step(run.model, inputs))
    assert executed == support.executions
    assert len(executed) == 4
